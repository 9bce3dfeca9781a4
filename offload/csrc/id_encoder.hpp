// SPDX-License-Identifier: Apache-2.0
// A column of Arrow as rows of a table, in one call for many samples.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "arrow_array.hpp"
#include "column.hpp"
#include "vocabulary.hpp"
#include "xxh64.hpp"

namespace sennit::offload {

// The id that text is hashed by: XXH64 of its bytes.
inline std::int64_t id_of(std::string_view text) {
  return static_cast<std::int64_t>(text.size() == 8 ? xxh64_of_8(text.data()) : xxh64(text.data(), text.size()));
}

struct EncodedIds {
  std::size_t count = 0;
  // One of these: rows of 32 bits if the table allows it.
  Buffer<std::int32_t> narrow;
  Buffer<std::int64_t> wide;
  // [samples + 1]; nothing: exactly one id per sample.
  std::size_t offset_count = 0;
  Buffer<std::int64_t> offsets;
};

class IdEncoder {
 public:
  // Ids are rows, or are hashed if there is a salt, or are looked up in a vocabulary. `first`: only so many ids of a
  // list are used. `hashes`: false if somebody else hashes the ids, which then are 64 bits wide.
  IdEncoder(std::int64_t rows, std::optional<std::int64_t> first, std::optional<std::int64_t> salt,
            std::shared_ptr<const Vocabulary> vocabulary, bool hashes)
      : rows_(rows), first_(first), salt_(salt), vocabulary_(std::move(vocabulary)), hashes_(hashes) {}

  // Nothing if a value is not allowed, or for a format that is not for these ids. Integers of all widths, text, lists
  // of both. Null lists are empty. Null ids are row 0 with a vocabulary, and no ids without.
  std::optional<EncodedIds> encode(std::string_view format, std::string_view leaf_format,
                                   const ArrowArray& column) const;

 private:
  struct Flat;
  bool read(std::string_view format, const ArrowArray& leaf, Flat& flat) const;
  template <typename Offset>
  EncodedIds hashed_texts(const ArrowArray& column) const;

  std::int64_t rows_;
  std::optional<std::int64_t> first_;
  std::optional<std::int64_t> salt_;
  std::shared_ptr<const Vocabulary> vocabulary_;
  bool hashes_;
};

}  // namespace sennit::offload
