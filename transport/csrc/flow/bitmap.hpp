// SPDX-License-Identifier: Apache-2.0
// Which packets of a credit are there: one bit a packet, in words of 64 that travel as they are.
#pragma once
#include <cstdint>
#include <vector>

namespace sennit::flow {

class Bitmap {
 public:
  // Keeps its capacity: a credit's place in its ring is used again and again.
  void reset(uint32_t bit_count) { words_.assign((bit_count + 63) / 64, 0); }
  bool test(uint32_t bit) const { return words_[bit / 64] >> (bit % 64) & 1; }
  void set(uint32_t bit) { words_[bit / 64] |= uint64_t{1} << (bit % 64); }
  void clear(uint32_t bit) { words_[bit / 64] &= ~(uint64_t{1} << (bit % 64)); }
  uint64_t word(uint32_t index) const { return words_[index]; }
  uint32_t word_count() const { return static_cast<uint32_t>(words_.size()); }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace sennit::flow
