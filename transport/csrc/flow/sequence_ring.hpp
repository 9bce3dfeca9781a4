// SPDX-License-Identifier: Apache-2.0
// A queue whose elements are named by their running number: push at the end, pop in front, look up by
// number. Grows by doubling and never shrinks, so that it does not allocate once it is warm.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace sennit::flow {

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

}  // namespace sennit::flow
