// SPDX-License-Identifier: Apache-2.0
// 16 lanes of float32, with GCC's and clang's vector types: one zmm, two ymm or four xmm registers.
//
// Included once for each instruction set, in a separate namespace: two sets must not share a symbol.
#pragma once

#include <cstdint>
#include <cstring>

#include "job.hpp"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace sennit::kernels::SENNIT_ISA {

using Floats = float __attribute__((vector_size(64)));
using Words = std::uint32_t __attribute__((vector_size(64)));
using Halves = std::uint16_t __attribute__((vector_size(32)));

constexpr std::size_t cache_line_bytes = 64;

#define SENNIT_INLINE [[gnu::always_inline]] static inline
#define SENNIT_INLINE_MEMBER [[gnu::always_inline]] inline

SENNIT_INLINE Floats all(float x) { return Floats{} + x; }
SENNIT_INLINE Words all_words(std::uint32_t x) { return Words{} + x; }
SENNIT_INLINE Words bits_of(Floats x) { return reinterpret_cast<Words>(x); }
SENNIT_INLINE Floats floats_of(Words x) { return reinterpret_cast<Floats>(x); }
SENNIT_INLINE Words lane_numbers() { return Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// `yes` in the lanes where the mask is all ones.
SENNIT_INLINE Words choose(Words mask, Words yes, Words no) { return (mask & yes) | (~mask & no); }
SENNIT_INLINE Words below(Words x, std::uint32_t limit) { return reinterpret_cast<Words>(x < limit); }

// The first `count` lanes, with zeros behind them.
SENNIT_INLINE Floats first_lanes(Floats x, std::size_t count) {
  return floats_of(bits_of(x) & below(lane_numbers(), static_cast<std::uint32_t>(count)));
}

SENNIT_INLINE Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
SENNIT_INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

SENNIT_INLINE Floats load(const float* from, std::size_t count) {
  if (count >= lanes) return load(from);
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#else
  Floats x{};
  for (std::size_t lane = 0; lane < count; lane++) x[lane] = from[lane];
  return x;
#endif
}
SENNIT_INLINE void store(float* to, Floats x, std::size_t count) {
  if (count >= lanes) return store(to, x);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), x);
#else
  for (std::size_t lane = 0; lane < count; lane++) to[lane] = x[lane];
#endif
}

SENNIT_INLINE Halves load_halves(const void* from, std::size_t count) {
  Halves x{};
  if (count >= lanes) {
    std::memcpy(&x, from, sizeof x);
    return x;
  }
#if defined(__AVX512VL__) && defined(__AVX512BW__)
  return reinterpret_cast<Halves>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from));
#else
  for (std::size_t lane = 0; lane < count; lane++) x[lane] = static_cast<const std::uint16_t*>(from)[lane];
  return x;
#endif
}
SENNIT_INLINE void store_halves(void* to, Halves x, std::size_t count) {
  if (count >= lanes) {
    std::memcpy(to, &x, sizeof x);
    return;
  }
#if defined(__AVX512VL__) && defined(__AVX512BW__)
  _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1), reinterpret_cast<__m256i>(x));
#else
  for (std::size_t lane = 0; lane < count; lane++) static_cast<std::uint16_t*>(to)[lane] = x[lane];
#endif
}

SENNIT_INLINE Words widen(Halves x) { return __builtin_convertvector(x, Words); }
SENNIT_INLINE Halves narrow(Words x) { return __builtin_convertvector(x, Halves); }

SENNIT_INLINE Floats root(Floats x) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(x);
#else
  for (std::size_t lane = 0; lane < lanes; lane++) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
#endif
}

// All ones in lanes that are infinite or NaN.
SENNIT_INLINE Words not_finite(Floats x) { return reinterpret_cast<Words>((bits_of(x) & 0x7f800000u) == 0x7f800000u); }

// Whether any bit of a mask is set.
SENNIT_INLINE bool any(Words mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#else
  std::uint32_t found = 0;
  for (std::size_t lane = 0; lane < lanes; lane++) found |= mask[lane];
  return found != 0;
#endif
}

// The sum over lanes as in docs/reference/embedding.md: halves are added until one lane is left.
SENNIT_INLINE float lane_sum(Floats x) {
  using Floats8 = float __attribute__((vector_size(32)));
  using Floats4 = float __attribute__((vector_size(16)));
  const Floats8 eight = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                        __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  const Floats4 four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// The same over `count` vectors, a power of two. They are overwritten.
SENNIT_INLINE float tree_sum(Floats* x, std::size_t count) {
  for (std::size_t half = count / 2; half > 0; half /= 2)
    for (std::size_t at = 0; at < half; at++) x[at] = x[at] + x[at + half];
  return lane_sum(x[0]);
}

// Products of each lane with a constant, as high and low words.
SENNIT_INLINE void multiply(Words x, std::uint32_t constant, Words& high, Words& low) {
#if defined(__AVX512F__)
  const __m512i factor = _mm512_set1_epi64(constant), wide = reinterpret_cast<__m512i>(x);
  const __m512i even = _mm512_mul_epu32(wide, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(wide, 32), factor);
  high = reinterpret_cast<Words>(_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd));
  low = reinterpret_cast<Words>(_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32)));
#else
  for (std::size_t lane = 0; lane < lanes; lane++) {
    const std::uint64_t product = std::uint64_t{x[lane]} * constant;
    high[lane] = static_cast<std::uint32_t>(product >> 32);
    low[lane] = static_cast<std::uint32_t>(product);
  }
#endif
}

}  // namespace sennit::kernels::SENNIT_ISA
