// SPDX-License-Identifier: Apache-2.0
// Converts rows between fp32, fp16 or bf16 and float32: to nearest, or stochastic (rule 8 of
// docs/reference/embedding.md).
#pragma once

#include "vector.hpp"

namespace sennit::kernels::SENNIT_ISA {

template <Precision precision>
SENNIT_INLINE const std::byte* element(const std::byte* row, std::size_t column) {
  return row + column * (precision == Precision::fp32 ? 4 : 2);
}

SENNIT_INLINE Floats from_fp16(Halves x) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(reinterpret_cast<__m256i>(x));
#elif defined(__F16C__)
  union {
    Floats whole;
    __m256 parts[2];
  } both;
  __m128i halves[2];
  std::memcpy(halves, &x, sizeof x);
  both.parts[0] = _mm256_cvtph_ps(halves[0]);
  both.parts[1] = _mm256_cvtph_ps(halves[1]);
  return both.whole;
#elif defined(__aarch64__)
  float16x4_t halves[4];
  std::memcpy(halves, &x, sizeof x);
  float32x4_t parts[4];
  for (int part = 0; part < 4; part++) parts[part] = vcvt_f32_f16(halves[part]);
  Floats whole;
  std::memcpy(&whole, parts, sizeof whole);
  return whole;
#else
  const Words wide = widen(x), magnitude = wide & 0x7fffu;
  const Words normal = (magnitude << 13) + (112u << 23);
  const Words special = (magnitude << 13) | 0x7f800000u;
  const Floats tiny = __builtin_convertvector(magnitude, Floats) * 0x1p-24f;
  Words bits = choose(below(magnitude, 0x7c00), normal, special);
  bits = choose(below(magnitude, 0x0400), bits_of(tiny), bits);
  return floats_of(bits | (wide & 0x8000u) << 16);
#endif
}

SENNIT_INLINE Halves to_fp16(Floats x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Halves>(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  __m256 parts[2];
  std::memcpy(parts, &x, sizeof x);
  __m128i halves[2] = {_mm256_cvtps_ph(parts[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                       _mm256_cvtps_ph(parts[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  Halves packed;
  std::memcpy(&packed, halves, sizeof packed);
  return packed;
#elif defined(__aarch64__)
  float32x4_t parts[4];
  std::memcpy(parts, &x, sizeof x);
  float16x4_t halves[4];
  for (int part = 0; part < 4; part++) halves[part] = vcvt_f16_f32(parts[part]);
  Halves packed;
  std::memcpy(&packed, halves, sizeof packed);
  return packed;
#else
  const Words bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const Words normal = ((magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10);
  // The unit of 1/2 is 2^-24, as for fp16's subnormal numbers, so the addition rounds.
  const Words subnormal = bits_of(floats_of(magnitude) + 0.5f) - 0x3f000000u;
  Words half = choose(below(magnitude, 0x47800000), normal, all_words(0x7c00));
  half = choose(below(magnitude, 0x38800000), subnormal, half);
  half = choose(below(magnitude, 0x7f800001), half, all_words(0x7e00));
  return narrow(half | (bits >> 16 & 0x8000u));
#endif
}

SENNIT_INLINE Halves to_bf16(Floats x) {
  const Words bits = bits_of(x);
  const Words rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return narrow(choose(below(bits & 0x7fffffffu, 0x7f800001), rounded, all_words(0x7fc0)));
}

SENNIT_INLINE Halves to_fp16(Floats x, Words random) {
  const Words bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  const Words moved = magnitude + (random & 0x1fffu);
  Words half = choose(below(moved, 0x47800000), (moved >> 13) - (112u << 10), all_words(0x7c00));
  const Words needed = 126u - (magnitude >> 23);
  const Words shift = choose(below(needed, 32), needed, Words{});
  const Words mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const Words shifted = (mantissa + (random & ((all_words(1) << shift) - 1u))) >> shift;
  const Words subnormal = choose(below(needed, 32), shifted, Words{});
  half = choose(below(magnitude, 0x38800000), subnormal, half);
  half = choose(below(magnitude, 0x7f800001), half, all_words(0x7e00));
  return narrow(half | (bits >> 16 & 0x8000u));
}

SENNIT_INLINE Halves to_bf16(Floats x, Words random) {
  const Words bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  Words half = choose(below(magnitude, 0x7f800000), (magnitude + (random & 0xffffu)) >> 16, all_words(0x7f80));
  half = choose(below(magnitude, 0x7f800001), half, all_words(0x7fc0));
  return narrow(half | (bits >> 16 & 0x8000u));
}

// The first `count` columns of a row, with zeros behind them.
template <Precision precision>
SENNIT_INLINE Floats load_row(const std::byte* from, std::size_t count) {
  if constexpr (precision == Precision::fp32) {
    return load(reinterpret_cast<const float*>(from), count);
  } else if constexpr (precision == Precision::fp16) {
    return from_fp16(load_halves(from, count));
  } else {
    return floats_of(widen(load_halves(from, count)) << 16);
  }
}

template <Precision precision>
SENNIT_INLINE void store_row(std::byte* to, Floats x, std::size_t count, bool is_stochastic, Words random) {
  if constexpr (precision == Precision::fp32) {
    store(reinterpret_cast<float*>(to), x, count);
  } else if constexpr (precision == Precision::fp16) {
    store_halves(to, is_stochastic ? to_fp16(x, random) : to_fp16(x), count);
  } else {
    store_halves(to, is_stochastic ? to_bf16(x, random) : to_bf16(x), count);
  }
}

// The random words of the 64 columns from column 64 * group: word n is for columns 16 * n to 16 * n + 15 of them.
// Never inlined: the ten rounds would be compiled into every optimizer, and a call costs nothing beside them.
[[gnu::noinline]] inline void random_words(const Table& table, const Step& step, std::uint32_t row, std::size_t group,
                                           Words (&words)[4]) {
  const std::uint64_t global = table.row_numbers != nullptr ? table.row_numbers[row] : table.first_row + row;
  Words c0 = all_words(static_cast<std::uint32_t>(global));
  Words c1 = static_cast<std::uint32_t>(global >> 32 << 16) | (lane_numbers() + static_cast<std::uint32_t>(16 * group));
  Words c2 = all_words(step.number);
  Words c3 = all_words(table.stream);
  auto k0 = static_cast<std::uint32_t>(step.seed), k1 = static_cast<std::uint32_t>(step.seed >> 32);
  for (int round = 0; round < 10; round++) {
    Words high0, low0, high1, low1;
    multiply(c0, 0xd2511f53u, high0, low0);
    multiply(c2, 0xcd9e8d57u, high1, low1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

}  // namespace sennit::kernels::SENNIT_ISA
