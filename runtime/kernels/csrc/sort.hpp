// SPDX-License-Identifier: Apache-2.0
// Sorts a table's lookups by row, equal rows in the order of the batch.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <span>

#include "job.hpp"

namespace sennit::kernels {

// Least-significant-digit radix sort (Knuth, TAOCP 3, 5.2.5) over the bits that row numbers use. The first pass reads
// its entries directly from the batch.
class RowSort {
 public:
  static constexpr int max_digit_bits = 9;
  static constexpr int max_passes = 4;

  explicit RowSort(std::uint32_t row_count) {
    const int bits = row_count > 1 ? std::bit_width(row_count - 1) : 1;
    passes_ = (bits + max_digit_bits - 1) / max_digit_bits;
    digit_bits_ = (bits + passes_ - 1) / passes_;
  }

  // A single pass needs no second buffer.
  std::size_t buffer_count() const { return passes_ > 1 ? 2 : 1; }

  // `each(take)` calls take(row, key) for each lookup, in order, and is called twice. Both buffers have room for all
  // lookups. Returns the sorted entries, which are in one of them.
  template <typename Each>
  std::span<Entry> operator()(Each each, Entry* one, Entry* other) {
    const std::uint32_t mask = (1u << digit_bits_) - 1;
    places_ = {};
    std::size_t count = 0;
    each([&](std::uint32_t row, std::uint32_t) {
      for (int pass = 0; pass < passes_; pass++) places_[pass][row >> (pass * digit_bits_) & mask]++;
      count++;
    });
    for (int pass = 0; pass < passes_; pass++) {
      std::uint32_t sum = 0;
      for (std::uint32_t digit = 0; digit <= mask; digit++) {
        const std::uint32_t here = places_[pass][digit];
        places_[pass][digit] = sum;
        sum += here;
      }
    }
    each([&](std::uint32_t row, std::uint32_t key) { one[places_[0][row & mask]++] = {row, key}; });
    for (int pass = 1; pass < passes_; pass++) {
      const int shift = pass * digit_bits_;
      for (std::size_t at = 0; at < count; at++) other[places_[pass][one[at].row() >> shift & mask]++] = one[at];
      std::swap(one, other);
    }
    return {one, count};
  }

 private:
  int passes_;
  int digit_bits_;
  std::array<std::array<std::uint32_t, 1 << max_digit_bits>, max_passes> places_;
};

}  // namespace sennit::kernels
