// SPDX-License-Identifier: Apache-2.0
// Folds against a plain scalar loop, in every variant of the kernels: all must give the same bits.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "messages/signature.hpp"
#include "reduce/fold.hpp"
#include "reduce/stream_copy.hpp"

namespace sennit {
namespace baseline {
FoldKernel find(sennit_dtype dtype, sennit_reduce reduce);
}
#if defined(__x86_64__)
namespace avx2 {
FoldKernel find(sennit_dtype dtype, sennit_reduce reduce);
}
namespace avx512 {
FoldKernel find(sennit_dtype dtype, sennit_reduce reduce);
}
#endif
}  // namespace sennit

using namespace sennit;

namespace {

using Find = FoldKernel (*)(sennit_dtype, sennit_reduce);

std::vector<Find> variants() {
  std::vector<Find> found{baseline::find};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) found.push_back(avx2::find);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    found.push_back(avx512::find);
  }
#endif
  return found;
}

struct Run {
  sennit_dtype dtype;
  sennit_reduce reduce;
  uint32_t source_count;
  uint64_t count;
  bool in_place;
};

std::vector<std::byte> fold_with(Find find, const Run& run, const std::vector<std::vector<std::byte>>& sources) {
  std::vector<std::vector<std::byte>> own = sources;
  std::vector<std::byte> destination(sources[0].size());
  std::vector<const void*> pointers;
  for (auto& source : own) pointers.push_back(source.data());
  // In place: the destination is the second source (or the only one).
  const size_t shared = run.source_count > 1 ? 1 : 0;
  std::byte* to = run.in_place ? own[shared].data() : destination.data();
  find(run.dtype, run.reduce)({to, pointers.data(), run.source_count, run.count, 3, 2.0});
  return run.in_place ? own[shared] : destination;
}

}  // namespace

TEST_CASE("every variant folds every type and operation to the same bits, in place or not") {
  std::mt19937 random(7);
  for (int dtype = 0; dtype <= SENNIT_C32; ++dtype) {
    for (int reduce = 0; reduce <= SENNIT_PREMUL_SUM; ++reduce) {
      const auto type = static_cast<sennit_dtype>(dtype);
      const auto op = static_cast<sennit_reduce>(reduce);
      const bool exists = baseline::find(type, op) != nullptr;
      for (Find find : variants()) CHECK((find(type, op) != nullptr) == exists);
      if (!exists) continue;
      for (uint32_t source_count : {1u, 2u, 3u, 5u}) {
        for (uint64_t count : {0ull, 1ull, 17ull, 9'001ull}) {
          std::vector<std::vector<std::byte>> sources(source_count);
          for (auto& source : sources) {
            source.resize(count * element_size_bytes(type));
            for (auto& byte : source) byte = static_cast<std::byte>(random());
            if (type == SENNIT_F16 || type == SENNIT_BF16 || type == SENNIT_C32) {
              // Clear the top exponent bit: no NaN, whose payload the standard leaves open.
              for (size_t i = 1; i < source.size(); i += 2) source[i] &= std::byte{0xBF};
            } else if (type == SENNIT_F32 || type == SENNIT_C64) {
              for (size_t i = 3; i < source.size(); i += 4) source[i] &= std::byte{0xBF};
            } else if (type == SENNIT_F64 || type == SENNIT_C128) {
              for (size_t i = 7; i < source.size(); i += 8) source[i] &= std::byte{0xBF};
            }
          }
          const std::vector<std::byte> expected =
              fold_with(baseline::find, {type, op, source_count, count, false}, sources);
          for (Find find : variants()) {
            for (bool in_place : {false, true}) {
              CAPTURE(dtype_name(dtype));
              CAPTURE(reduce_name(reduce));
              CAPTURE(count);
              CHECK(fold_with(find, {type, op, source_count, count, in_place}, sources) == expected);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("the order of a fold is left to right") {
  const float one = 1.0f, half_ulp = 0x1p-24f;
  const void* sources[] = {&one, &half_ulp, &half_ulp};
  float result = 0;
  find_fold(SENNIT_F32, SENNIT_SUM)({&result, sources, 3, 1, 1, 1.0});
  CHECK(result == 1.0f);
  CHECK(result != one + (half_ulp + half_ulp));
}

TEST_CASE("half and bfloat16 sums are rounded once, to nearest even") {
  // 2048 + 1 + 1 in binary16: rounding after each addition would lose both ones (2049 is not representable).
  const uint16_t large = 0x6800, one = 0x3C00;
  const void* sources[] = {&large, &one, &one};
  uint16_t result = 0;
  for (Find find : variants()) {
    find(SENNIT_F16, SENNIT_SUM)({&result, sources, 3, 1, 1, 1.0});
    CHECK(result == 0x6801);  // 2050
  }
  const uint16_t b256 = 0x4380, b1 = 0x3F80;  // bfloat16 256 and 1: 257 and 258 need more than 8 bits
  const void* brain[] = {&b256, &b1, &b1};
  for (Find find : variants()) {
    find(SENNIT_BF16, SENNIT_SUM)({&result, brain, 3, 1, 1, 1.0});
    CHECK(result == 0x4381);  // 258
  }
}

TEST_CASE("every half converts to float and back unchanged") {
  for (Find find : variants()) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      if ((bits & 0x7C00) == 0x7C00 && (bits & 0x3FF) != 0) continue;  // NaN
      const auto half = static_cast<uint16_t>(bits);
      const void* sources[] = {&half};
      uint16_t result = 0;
      find(SENNIT_F16, SENNIT_PRODUCT)({&result, sources, 1, 1, 1, 1.0});
      REQUIRE(result == half);
    }
  }
}

TEST_CASE("NaN wins minimum and maximum, integers wrap, means truncate, truth is any and all") {
  const float nan = std::nanf(""), one = 1.0f;
  float result = 0;
  for (auto op : {SENNIT_MIN, SENNIT_MAX}) {
    const void* left[] = {&nan, &one};
    const void* right[] = {&one, &nan};
    find_fold(SENNIT_F32, op)({&result, left, 2, 1, 1, 1.0});
    CHECK(std::isnan(result));
    find_fold(SENNIT_F32, op)({&result, right, 2, 1, 1, 1.0});
    CHECK(std::isnan(result));
  }
  const int8_t high = 127, two = 2;
  const void* wrap[] = {&high, &two};
  int8_t small = 0;
  find_fold(SENNIT_I8, SENNIT_SUM)({&small, wrap, 2, 1, 1, 1.0});
  CHECK(small == -127);
  const int32_t a = -3, b = -4;
  const void* mean[] = {&a, &b};
  int32_t whole = 0;
  find_fold(SENNIT_I32, SENNIT_AVG)({&whole, mean, 2, 1, 2, 1.0});
  CHECK(whole == -3);
  const uint8_t yes = 1, no = 0;
  const void* truth[] = {&yes, &no};
  uint8_t bit = 9;
  find_fold(SENNIT_BOOL, SENNIT_SUM)({&bit, truth, 2, 1, 1, 1.0});
  CHECK(bit == 1);
  find_fold(SENNIT_BOOL, SENNIT_PRODUCT)({&bit, truth, 2, 1, 1, 1.0});
  CHECK(bit == 0);
}

TEST_CASE("stream_copy copies every alignment and length") {
  std::vector<unsigned char> source(2'000), destination(2'100);
  std::mt19937 random(3);
  for (auto& byte : source) byte = static_cast<unsigned char>(random());
  for (size_t shift : {0, 1, 31, 63}) {
    for (size_t length : {0, 1, 63, 64, 65, 255, 256, 1'000, 1'900}) {
      std::fill(destination.begin(), destination.end(), 0xEE);
      stream_copy(destination.data() + shift, source.data() + shift / 2, length);
      CHECK(std::memcmp(destination.data() + shift, source.data() + shift / 2, length) == 0);
      CHECK(destination[shift + length] == 0xEE);
      if (shift != 0) CHECK(destination[shift - 1] == 0xEE);
    }
  }
}
