// SPDX-License-Identifier: Apache-2.0
// Bytes of a test, in the shared heap or in other memory, with guards on both sides.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "memory/shared_heap.hpp"

namespace sennit::test {

class Bytes {
 public:
  static constexpr size_t GUARD_BYTES = 512;
  static constexpr std::byte GUARD{0x5A};
  Bytes(size_t size_bytes, bool is_in_heap) : size_bytes_(size_bytes) {
    if (is_in_heap) {
      whole_ = static_cast<std::byte*>(SharedHeap::allocate(size_bytes + 2 * GUARD_BYTES));
      REQUIRE(whole_ != nullptr);
    } else {
      plain_.resize(size_bytes + 2 * GUARD_BYTES);
      whole_ = plain_.data();
    }
    std::fill_n(whole_, size_bytes + 2 * GUARD_BYTES, GUARD);
  }
  ~Bytes() {
    if (plain_.empty()) SharedHeap::free(whole_);
  }
  Bytes(const Bytes&) = delete;

  Bytes& fill(uint32_t seed) {
    std::mt19937 random(seed);
    for (auto& byte : span()) byte = static_cast<std::byte>(random());
    return *this;
  }
  void fill_with(std::byte value) { std::fill_n(data(), size(), value); }
  std::byte* data() const { return whole_ + GUARD_BYTES; }
  size_t size() const { return size_bytes_; }
  std::span<std::byte> span() const { return {data(), size_bytes_}; }
  std::vector<std::byte> copy() const { return {data(), data() + size_bytes_}; }
  bool holds(const std::vector<std::byte>& bytes) const { return std::ranges::equal(span(), bytes); }
  bool is_all(std::byte value) const {
    return std::ranges::all_of(span(), [=](std::byte byte) { return byte == value; });
  }
  bool are_guards_whole() const {
    const auto is_guard = [](std::byte byte) { return byte == GUARD; };
    return std::all_of(whole_, data(), is_guard) &&
           std::all_of(data() + size_bytes_, data() + size_bytes_ + GUARD_BYTES, is_guard);
  }

 private:
  const size_t size_bytes_;
  std::vector<std::byte> plain_;
  std::byte* whole_;
};

}  // namespace sennit::test
