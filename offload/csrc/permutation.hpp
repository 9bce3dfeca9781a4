// SPDX-License-Identifier: Apache-2.0
// A keyed bijection on [0, size): a shuffle of any number of samples that takes no memory.
//
// Feistel network over the least power of two that holds `size`, with halves that may differ by one bit (Luby, Rackoff
// 1988), and cycle walking back into the range (Black, Rogaway 2002, "Ciphers with Arbitrary Finite Domains", section
// 3). Its use for shuffling: Mitchell, Stokes, Frank, Holmes 2022, "Bandwidth-Optimal Random Shuffling for GPUs".
// It is for shuffling only and no cipher.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>

namespace sennit::offload {

class KeyedPermutation {
 public:
  static constexpr int rounds = 8;
  using Keys = std::array<std::uint64_t, rounds>;

  // 1 <= size <= 2^62
  KeyedPermutation(std::uint64_t size, const Keys& keys) : size_(size), keys_(keys) {
    const int bits = std::max(2, static_cast<int>(std::bit_width(size - 1)));
    low_bits_ = bits / 2;
    low_mask_ = (std::uint64_t{1} << low_bits_) - 1;
    high_mask_ = (std::uint64_t{1} << (bits - low_bits_)) - 1;
  }

  // Where `place` goes; place < size.
  std::uint64_t operator()(std::uint64_t place) const {
    // The domain is less than twice the range (or 4), so this takes fewer than two turns on average.
    do place = encrypt(place);
    while (place >= size_);
    return place;
  }

  // In place; each element must be in [0, size).
  void apply(std::span<std::int64_t> places) const {
    for (auto& place : places) place = static_cast<std::int64_t>((*this)(static_cast<std::uint64_t>(place)));
  }

  std::uint64_t size() const { return size_; }

 private:
  std::uint64_t encrypt(std::uint64_t place) const {
    std::uint64_t low = place & low_mask_, high = place >> low_bits_;
    for (int round = 0; round < rounds; round += 2) {
      low ^= mix(high + keys_[round]) & low_mask_;
      high ^= mix(low + keys_[round + 1]) & high_mask_;
    }
    return high << low_bits_ | low;
  }

  // The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
  }

  std::uint64_t size_;
  Keys keys_;
  int low_bits_;
  std::uint64_t low_mask_, high_mask_;
};

}  // namespace sennit::offload
