// SPDX-License-Identifier: Apache-2.0
// Digests of what kernels compute, for tests that compare processors: a test has the digest as a constant, and runs on
// x86-64 (make test-cpp) and on Arm cores (make cross).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sennit::tests {

// FNV-1a, 64 bits (Fowler, Noll, Vo; draft-eastlake-fnv).
class Digest {
 public:
  void add(std::span<const std::byte> bytes) {
    for (const std::byte byte : bytes) value_ = (value_ ^ std::to_integer<std::uint64_t>(byte)) * 0x100000001B3u;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xCBF29CE484222325u;
};

}  // namespace sennit::tests
