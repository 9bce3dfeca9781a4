// SPDX-License-Identifier: Apache-2.0
// lossless: elements as planes of bytes, each plane raw, one byte, or in a Huffman code. docs/reference/codecs.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace sennit {

// The most bytes that the codes of so many elements take.
uint64_t lossless_bytes(uint64_t item_bytes, uint64_t count);

// Elements of 2, 4 or 8 bytes. `is_float`: the exponent becomes a plane. The destination has room for lossless_bytes.
// Returns the bytes written.
uint64_t lossless_encode(bool is_float, uint64_t item_bytes, const std::byte* source, uint64_t count,
                         std::byte* destination);

// Returns how much of `coded` the elements take: what lossless_encode could have written. Nothing if it could not.
[[nodiscard]] std::optional<uint64_t> lossless_decode(bool is_float, uint64_t item_bytes,
                                                      std::span<const std::byte> coded, uint64_t count,
                                                      std::byte* destination);

}  // namespace sennit
