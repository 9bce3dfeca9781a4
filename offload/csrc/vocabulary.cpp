// SPDX-License-Identifier: Apache-2.0
#include "vocabulary.hpp"

#include <bit>
#include <stdexcept>

#include "xxh64.hpp"

namespace sennit::offload {

Vocabulary::Vocabulary(std::string_view format, const ArrowArray& values) {
  is_text_ = format == "U";
  is_signed_ = format == "l";
  if (!is_text_ && !is_signed_ && format != "L")
    throw std::invalid_argument("a vocabulary of format " + std::string(format) + "; allowed: l, L and U");
  const auto count = static_cast<std::size_t>(values.length), first = static_cast<std::size_t>(values.offset);
  // At most half full, so that an unknown value meets an empty slot soon.
  const int bits = std::bit_width(count) + 1;
  slots_.resize(std::size_t{1} << bits);
  mask_ = slots_.size() - 1;
  shift_ = 64 - bits;
  begins_.push_back(0);
  for (std::size_t i = 0; i < count; i++) {
    const auto row = static_cast<std::int64_t>(i + 1);
    if (!is_text_) {
      insert(elements<std::uint64_t>(values)[first + i], row);
      continue;
    }
    const std::string_view value = Texts<std::int64_t>(values)[first + i];
    bytes_ += value;
    begins_.push_back(bytes_.size());
    insert(xxh64(value.data(), value.size()), row);
  }
}

bool Vocabulary::knows(std::string_view format) const {
  // Without values, any type will do: all are unknown.
  if (begins_.size() == 1 && is_text_) return true;
  return is_text_ == is_text(format);
}

std::int64_t Vocabulary::row(std::string_view value) const {
  const std::uint64_t hash = xxh64(value.data(), value.size());
  for (std::size_t place = home(hash);; place = (place + 1) & mask_) {
    const Slot& slot = slots_[place];
    if (slot.row == UNKNOWN_ROW || (slot.key == hash && text(slot.row) == value)) return slot.row;
  }
}

void Vocabulary::insert(std::uint64_t key, std::int64_t row) {
  std::size_t place = home(key);
  while (slots_[place].row != UNKNOWN_ROW) place = (place + 1) & mask_;
  slots_[place] = {key, row};
}

}  // namespace sennit::offload
