// SPDX-License-Identifier: Apache-2.0
// The sums of BPF programs (ebpf/include/float_sum.h) against those of this processor: equal bits. Which NaN comes out
// is unspecified (docs/reference/plans.md, "Arithmetic").
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "../../../ebpf/include/float_sum.h"
#include "reduce/fold.hpp"

using namespace sennit;

namespace {

bool is_nan(uint32_t bits) { return std::isnan(std::bit_cast<float>(bits)); }

uint32_t sum_here(uint32_t a, uint32_t b) {
  // Volatile, so that it is this processor that adds, not the compiler.
  const volatile float left = std::bit_cast<float>(a), right = std::bit_cast<float>(b);
  return std::bit_cast<uint32_t>(left + right);
}

// The edges of all that a float32 can be, and what lies beside them.
std::vector<uint32_t> special() {
  std::vector<uint32_t> found;
  for (uint32_t exponent : {0u, 1u, 2u, 22u, 23u, 24u, 25u, 126u, 127u, 128u, 150u, 151u, 152u, 253u, 254u, 255u})
    for (uint32_t fraction : {0u, 1u, 2u, 3u, 0x3fffffu, 0x400000u, 0x400001u, 0x7ffffeu, 0x7fffffu})
      for (uint32_t sign : {0u, FLOAT_SIGN}) found.push_back(sign | exponent << 23 | fraction);
  return found;
}

void check(uint32_t a, uint32_t b) {
  const uint32_t ours = float_sum(a, b), here = sum_here(a, b);
  if (is_nan(here) ? is_nan(ours) : ours == here) return;
  CAPTURE(a);
  CAPTURE(b);
  CHECK(ours == here);
}

}  // namespace

TEST_CASE("sums of special numbers have the bits of this processor") {
  const std::vector<uint32_t> numbers = special();
  for (const uint32_t a : numbers)
    for (const uint32_t b : numbers) check(a, b);
}

TEST_CASE("sums of random numbers have the bits of this processor") {
  std::mt19937 random(1);
  for (int n = 0; n < 1'000'000; ++n) {
    const auto a = static_cast<uint32_t>(random());
    auto b = static_cast<uint32_t>(random());
    // Every other one has an exponent close to that of the first, so that rounding and cancellation happen.
    if (n & 1)
      b = (b & ~FLOAT_INFINITY) | (std::min((a >> 23 & 255) + static_cast<uint32_t>(random() % 60), 254u) << 23);
    check(a, b);
    check(b, a);
  }
}

TEST_CASE("one NaN stays, and is made quiet") {
  CHECK(float_sum(0x7f800001, 0x3f800000) == 0x7fc00001);
  CHECK(float_sum(0x3f800000, 0xff812345) == 0xffc12345);
  CHECK(is_nan(float_sum(0x7f800000, 0xff800000)));
}

TEST_CASE("bfloat16 is rounded as folds round it") {
  const FoldKernel fold = find_fold(SENNIT_BF16, SENNIT_SUM);
  std::mt19937 random(2);
  for (int n = 0; n < 200'000; ++n) {
    const auto a = static_cast<uint16_t>(random());
    auto b = static_cast<uint16_t>(random());
    if (n & 1) b = static_cast<uint16_t>((b & 0x807f) | (a & 0x7f80));
    const FoldSource sources[] = {{&a, 0, false}, {&b, 1, false}};
    uint16_t here = 0;
    fold({.destination = &here, .sources = sources, .count = 1, .divisor = 1, .scalar = 1, .gives_partial = false});
    const uint16_t ours = bfloat_of(float_sum(uint32_t{a} << 16, uint32_t{b} << 16));
    if (ours != here) {
      CAPTURE(a);
      CAPTURE(b);
      CHECK(ours == here);
    }
  }
}
