// SPDX-License-Identifier: Apache-2.0
// Folds against a plain scalar loop, in every variant of the kernels: all must give the same bits.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "digest.hpp"
#include "messages/signature.hpp"
#include "reduce/fold.hpp"
#include "reduce/large_copy.hpp"

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

// The canonical tree over `count` operands: what a binary counter does with its carries.
uint32_t tree(uint32_t operand, uint32_t count) {
  return static_cast<uint32_t>(operand + 1 == count ? std::popcount(operand) : std::countr_one(operand));
}

std::vector<FoldSource> leaves(const std::vector<const void*>& data) {
  std::vector<FoldSource> sources;
  for (const void* leaf : data) {
    const auto operand = static_cast<uint32_t>(sources.size());
    sources.push_back({leaf, tree(operand, static_cast<uint32_t>(data.size())), false});
  }
  return sources;
}

template <class T>
T fold_of(Find find, sennit_dtype dtype, sennit_reduce reduce, const std::vector<T>& values) {
  std::vector<const void*> data;
  for (const T& value : values) data.push_back(&value);
  const std::vector<FoldSource> sources = leaves(data);
  T result{};
  find(dtype, reduce)({&result, sources, 1, static_cast<uint32_t>(values.size()), 2.0, false});
  return result;
}

using Bytes = std::vector<std::byte>;

// Random elements without NaN, whose payload the standard leaves open.
Bytes random_elements(std::mt19937& random, sennit_dtype type, uint64_t count) {
  Bytes made(count * element_size_bytes(type));
  for (auto& byte : made) byte = static_cast<std::byte>(random());
  size_t number_bytes = 0;
  if (type == SENNIT_F16 || type == SENNIT_BF16 || type == SENNIT_C32) number_bytes = 2;
  if (type == SENNIT_F32 || type == SENNIT_C64) number_bytes = 4;
  if (type == SENNIT_F64 || type == SENNIT_C128) number_bytes = 8;
  // The top bit of the exponent is cleared.
  if (number_bytes != 0)
    for (size_t i = number_bytes - 1; i < made.size(); i += number_bytes) made[i] &= std::byte{0xBF};
  if (type == SENNIT_BOOL)
    for (auto& byte : made) byte &= std::byte{1};
  return made;
}

struct Folding {
  sennit_dtype dtype;
  sennit_reduce reduce;
  uint64_t count;
  const std::vector<Bytes>& values;
  const std::vector<uint32_t>& program;
  std::vector<bool> partial;
  bool gives_partial = false;
};

// `shared`: the operand whose place the result takes, or -1.
Bytes fold_with(Find find, const Folding& folding, int shared = -1) {
  std::vector<Bytes> own = folding.values;
  const sennit_dtype result = folding.gives_partial ? accumulator(folding.dtype) : folding.dtype;
  Bytes destination(folding.count * element_size_bytes(result));
  std::vector<FoldSource> sources;
  for (size_t i = 0; i < own.size(); ++i)
    sources.push_back({own[i].data(), folding.program[i], !folding.partial.empty() && folding.partial[i]});
  Bytes& to = shared < 0 ? destination : own[static_cast<size_t>(shared)];
  find(folding.dtype, folding.reduce)({to.data(), sources, folding.count, 3, 2.0, folding.gives_partial});
  return to;
}

// The same, combination by combination: each is a fold of two partial sums, and only the last is finished.
Bytes fold_stepwise(const Folding& folding) {
  std::vector<Bytes> stack;
  const auto combine = [&](const std::vector<Bytes>& values, const std::vector<bool>& partial, bool gives_partial) {
    const std::vector<uint32_t> program = values.size() == 1 ? std::vector<uint32_t>{0} : std::vector<uint32_t>{0, 1};
    return fold_with(baseline::find,
                     {folding.dtype, folding.reduce, folding.count, values, program, partial, gives_partial});
  };
  for (size_t i = 0; i < folding.values.size(); ++i) {
    stack.push_back(combine({folding.values[i]}, {!folding.partial.empty() && folding.partial[i]}, true));
    for (uint32_t n = 0; n < folding.program[i]; ++n) {
      const Bytes right = stack.back();
      stack.pop_back();
      stack.back() = combine({stack.back(), right}, {true, true}, true);
    }
  }
  return combine(stack, {true}, folding.gives_partial);
}

const std::vector<std::vector<uint32_t>> PROGRAMS = {
    {0},
    {0, 1},
    {0, 1, 1},
    {0, 0, 2},
    {0, 1, 0, 2},
    {0, 1, 1, 1},
    {0, 0, 0, 3},
    {0, 0, 1, 2},
    {0, 1, 0, 2, 1},
    {0, 1, 0, 2, 0, 2},
    {0, 0, 2, 1},
    {0, 0, 0, 1, 3},
    {0, 0, 0, 2, 2},
    {0, 1, 0, 2, 0, 1, 0, 3},
};

}  // namespace

TEST_CASE(
    "every variant folds every type, operation and program to the same bits on every processor, in place or not") {
  std::mt19937 random(7);
  tests::Digest digest;
  for (int dtype = 0; dtype <= SENNIT_C32; ++dtype) {
    for (int reduce = 0; reduce <= SENNIT_PREMUL_SUM; ++reduce) {
      const auto type = static_cast<sennit_dtype>(dtype);
      const auto op = static_cast<sennit_reduce>(reduce);
      const bool exists = baseline::find(type, op) != nullptr;
      for (Find find : variants()) CHECK((find(type, op) != nullptr) == exists);
      if (!exists) continue;
      for (const std::vector<uint32_t>& program : PROGRAMS) {
        for (uint64_t count : {0ull, 17ull, 4'101ull}) {
          std::vector<Bytes> values;
          for (size_t i = 0; i < program.size(); ++i) values.push_back(random_elements(random, type, count));
          const Folding folding{type, op, count, values, program, {}};
          const Bytes expected = fold_stepwise(folding);
          digest.add(expected);
          for (Find find : variants()) {
            CAPTURE(dtype_name(dtype));
            CAPTURE(reduce_name(reduce));
            CAPTURE(program.size());
            CHECK(fold_with(find, folding) == expected);
            for (const int shared : {0, static_cast<int>(program.size()) - 1})
              CHECK(fold_with(find, folding, shared) == expected);
          }
        }
      }
    }
  }
  CHECK(digest.value() == 0x807C375EABD76227u);
}

TEST_CASE("leaves and partial sums mix, and partial sums are neither scaled again nor rounded") {
  std::mt19937 random(8);
  for (const auto type : {SENNIT_F16, SENNIT_BF16, SENNIT_F32, SENNIT_C32, SENNIT_I16, SENNIT_BOOL}) {
    for (const auto op : {SENNIT_SUM, SENNIT_AVG, SENNIT_PREMUL_SUM, SENNIT_MAX}) {
      if (baseline::find(type, op) == nullptr) continue;
      for (const std::vector<uint32_t>& program : PROGRAMS) {
        for (int round = 0; round < 4; ++round) {
          constexpr uint64_t COUNT = 2'053;
          std::vector<Bytes> values;
          std::vector<bool> partial;
          for (size_t i = 0; i < program.size(); ++i) {
            partial.push_back(round == 0 || random() % 2 == 0);
            values.push_back(random_elements(random, partial[i] ? accumulator(type) : type, COUNT));
          }
          const Folding folding{type, op, COUNT, values, program, partial, round % 2 == 0};
          const Bytes expected = fold_stepwise(folding);
          for (Find find : variants()) {
            CAPTURE(dtype_name(type));
            CAPTURE(reduce_name(op));
            CHECK(fold_with(find, folding) == expected);
          }
        }
      }
    }
  }
  const float three = 3.0f;
  const std::vector<FoldSource> sources{{&three, 0, true}};
  uint16_t narrow = 0;
  float wide = 0;
  find_fold(SENNIT_F16, SENNIT_AVG)({&narrow, sources, 1, 2, 1.0, false});
  CHECK(narrow == 0x3E00);  // 1.5
  find_fold(SENNIT_F16, SENNIT_AVG)({&wide, sources, 1, 2, 1.0, true});
  CHECK(wide == 3.0f);
  find_fold(SENNIT_F16, SENNIT_PREMUL_SUM)({&wide, sources, 1, 2, 0.5, true});
  CHECK(wide == 3.0f);
}

TEST_CASE("the order of a fold is the tree's") {
  const float one = 1.0f, half_ulp = 0x1p-24f;
  CHECK(fold_of<float>(find_fold, SENNIT_F32, SENNIT_SUM, {one, half_ulp, half_ulp, half_ulp}) ==
        (one + half_ulp) + (half_ulp + half_ulp));
  CHECK(((one + half_ulp) + half_ulp) + half_ulp != (one + half_ulp) + (half_ulp + half_ulp));
  // Operands stay left and right of one another: the first NaN, and the last of equals.
  CHECK(std::signbit(fold_of<float>(find_fold, SENNIT_F32, SENNIT_MIN, {0.0f, 0.0f, 0.0f, -0.0f})));
  CHECK(!std::signbit(fold_of<float>(find_fold, SENNIT_F32, SENNIT_MIN, {-0.0f, -0.0f, -0.0f, 0.0f})));
}

TEST_CASE("half and bfloat16 sums are rounded once, to nearest even") {
  // 2048 + 1 + 1 in binary16: rounding after each addition would lose both ones (2049 is no half).
  for (Find find : variants())
    CHECK(fold_of<uint16_t>(find, SENNIT_F16, SENNIT_SUM, {0x6800, 0x3C00, 0x3C00}) == 0x6801);  // 2050
  // bfloat16 256 and 1: 257 and 258 need more than 8 bits.
  for (Find find : variants())
    CHECK(fold_of<uint16_t>(find, SENNIT_BF16, SENNIT_SUM, {0x4380, 0x3F80, 0x3F80}) == 0x4381);  // 258
}

TEST_CASE("every half converts to float and back unchanged") {
  for (Find find : variants()) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      if ((bits & 0x7C00) == 0x7C00 && (bits & 0x3FF) != 0) continue;  // NaN
      const auto half = static_cast<uint16_t>(bits);
      const uint16_t result = fold_of<uint16_t>(find, SENNIT_F16, SENNIT_PRODUCT, {half});
      REQUIRE(result == half);
    }
  }
}

TEST_CASE("NaN wins minimum and maximum, integers wrap, means truncate, truth is any and all") {
  const float nan = std::nanf("");
  for (auto op : {SENNIT_MIN, SENNIT_MAX}) {
    CHECK(std::isnan(fold_of<float>(find_fold, SENNIT_F32, op, {nan, 1.0f})));
    CHECK(std::isnan(fold_of<float>(find_fold, SENNIT_F32, op, {1.0f, nan})));
  }
  CHECK(fold_of<int8_t>(find_fold, SENNIT_I8, SENNIT_SUM, {127, 2}) == -127);
  CHECK(fold_of<int32_t>(find_fold, SENNIT_I32, SENNIT_AVG, {-3, -4}) == -3);
  CHECK(fold_of<uint8_t>(find_fold, SENNIT_BOOL, SENNIT_SUM, {1, 0}) == 1);
  CHECK(fold_of<uint8_t>(find_fold, SENNIT_BOOL, SENNIT_PRODUCT, {1, 0}) == 0);
}

TEST_CASE("the way to copy that wins most pairs is kept, whatever single pieces take") {
  using Way = CopyTrial::Way;
  for (const bool streaming_is_faster : {false, true}) {
    CopyTrial trial;
    std::mt19937 random(1);
    uint32_t pieces = 0;
    for (; trial.way() == Way::undecided && pieces < 1'000; ++pieces) {
      const Way way = trial.next();
      CHECK(way == (pieces % 2 == 0 ? Way::plain : Way::streaming));
      const bool lost_its_core = random() % 8 == 0;
      const bool is_fast = (way == Way::streaming) == streaming_is_faster;
      trial.note(way, (is_fast ? 100 : 130) + (lost_its_core ? 4'000 : 0));
    }
    CHECK(pieces == 2 * CopyTrial::PAIRS);
    CHECK(trial.way() == (streaming_is_faster ? Way::streaming : Way::plain));
  }
}

TEST_CASE("large_copy copies the same bytes before and after it has chosen") {
  std::vector<std::byte> source(300'000), destination(300'000);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7);
  for (size_t round = 0; round < 3 * CopyTrial::PAIRS; ++round) {
    const size_t shift = round % 61, size_bytes = 70'000 + round * 1'001;
    std::fill(destination.begin(), destination.end(), std::byte{});
    large_copy(CopySource::memory, destination.data() + shift, source.data() + round, size_bytes);
    CHECK(std::memcmp(destination.data() + shift, source.data() + round, size_bytes) == 0);
    CHECK(destination[shift + size_bytes] == std::byte{});
  }
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
