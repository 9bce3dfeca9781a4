// SPDX-License-Identifier: Apache-2.0
// Containers indexed by running numbers: a queue, a sliding window, a set of bits.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace sennit::flow {

// A queue whose elements are named by their running number: push at the end, pop in front, look up by number. It grows
// by doubling and never shrinks, so that it soon stops allocating.
template <typename T>
class SequenceRing {
 public:
  bool empty() const { return first_ == end_; }
  size_t size() const { return static_cast<size_t>(end_ - first_); }
  uint64_t first() const { return first_; }
  uint64_t end() const { return end_; }
  bool holds(uint64_t number) const { return number >= first_ && number < end_; }

  T& operator[](uint64_t number) { return cells_[number & (cells_.size() - 1)]; }
  const T& operator[](uint64_t number) const { return cells_[number & (cells_.size() - 1)]; }
  T& front() { return (*this)[first_]; }
  const T& front() const { return (*this)[first_]; }

  uint64_t push(T value) {
    if (size() == cells_.size()) grow();
    (*this)[end_] = std::move(value);
    return end_++;
  }
  void pop() { ++first_; }
  void clear() { first_ = end_; }

 private:
  void grow() {
    std::vector<T> larger(cells_.empty() ? 8 : cells_.size() * 2);
    for (uint64_t number = first_; number != end_; ++number)
      larger[number & (larger.size() - 1)] = std::move((*this)[number]);
    cells_ = std::move(larger);
  }

  std::vector<T> cells_;
  uint64_t first_ = 0, end_ = 0;
};

// Cells of a sliding window of running numbers. It grows by doubling with the widest window seen: most flows have only
// a few credits open, and a rank has a flow to every other rank.
template <typename T>
class SlidingRing {
 public:
  T& operator[](uint64_t number) { return cells_[number & (cells_.size() - 1)]; }
  const T& operator[](uint64_t number) const { return cells_[number & (cells_.size() - 1)]; }

  // The window is now [first, end). It has cells for all of these, and cells in use keep their contents.
  void cover(uint64_t first, uint64_t end) {
    if (end - first <= cells_.size()) return;
    std::vector<T> larger(std::bit_ceil(static_cast<size_t>(end - first)));
    if (!cells_.empty()) {
      const uint64_t kept_end = first + cells_.size();
      for (uint64_t number = first; number != kept_end; ++number)
        larger[number & (larger.size() - 1)] = std::move((*this)[number]);
    }
    cells_ = std::move(larger);
  }

 private:
  std::vector<T> cells_;
};

// Which packets of a credit have arrived: one bit for each packet, in words of 64 bits that travel unchanged.
class Bitmap {
 public:
  // Keeps its capacity, because a credit's place in its ring is reused again and again.
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
