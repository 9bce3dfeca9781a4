// SPDX-License-Identifier: Apache-2.0
// Which row of a table a value has: value i of a vocabulary has row i + 1, and every other value has row 0.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "arrow_array.hpp"

namespace sennit::offload {

class Vocabulary {
 public:
  static constexpr std::int64_t UNKNOWN_ROW = 0;

  // The values are copied: integers of 64 bits, or text with large offsets, without nulls. Throws
  // std::invalid_argument for others.
  Vocabulary(std::string_view format, const ArrowArray& values);

  // Whether an array of this format may have its values.
  bool knows(std::string_view format) const;

  // `bits`: those of the integer, extended to 64. `is_signed`: as the type of the column.
  std::int64_t row(std::uint64_t bits, bool is_signed) const {
    // Equal bits are another number if one type has a sign, the other has none, and the uppermost bit is set.
    if (is_signed != is_signed_ && bits >> 63 != 0) return UNKNOWN_ROW;
    for (std::size_t place = home(bits);; place = (place + 1) & mask_) {
      const Slot& slot = slots_[place];
      if (slot.row == UNKNOWN_ROW || slot.key == bits) return slot.row;
    }
  }
  std::int64_t row(std::string_view text) const;

 private:
  // Open addressing. `key`: the integer, or the hash of the text. Row 0: the slot is empty.
  struct Slot {
    std::uint64_t key;
    std::int64_t row;
  };

  // Multiplicative hashing (Knuth, The Art of Computer Programming 3, section 6.4).
  std::size_t home(std::uint64_t key) const { return (key * 0x9E3779B97F4A7C15u) >> shift_; }
  std::string_view text(std::int64_t row) const {
    const std::size_t begin = begins_[row - 1];
    return std::string_view(bytes_).substr(begin, begins_[row] - begin);
  }
  void insert(std::uint64_t key, std::int64_t row);

  bool is_text_ = false;
  bool is_signed_ = true;
  std::vector<Slot> slots_;
  std::size_t mask_;
  int shift_;
  std::string bytes_;
  std::vector<std::size_t> begins_;
};

}  // namespace sennit::offload
