// SPDX-License-Identifier: Apache-2.0
// Cells of a window of running numbers that slides forward. Grows by doubling with the widest window seen: most
// flows never have more than a few credits open, and a rank has a flow to every other rank.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace sennit::flow {

template <typename T>
class WindowRing {
 public:
  T& operator[](uint64_t number) { return cells_[number & (cells_.size() - 1)]; }
  const T& operator[](uint64_t number) const { return cells_[number & (cells_.size() - 1)]; }

  // The window is [first, end) now: it has cells for all of these, and those in use keep what they hold.
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

}  // namespace sennit::flow
