// SPDX-License-Identifier: Apache-2.0
// 16 lanes of float32 as whole registers of the instruction set. GCC keeps them there, where it moves the halves of the
// vectors of vector.hpp through memory for an instruction that it has no operator for: the fused multiply-add.
//
// Included once for each instruction set, in a separate namespace.
#pragma once

#include "vector.hpp"

namespace sennit::kernels::SENNIT_ISA {

#if defined(__AVX512F__)
constexpr std::size_t part_lanes = 16;
#elif defined(__AVX2__)
constexpr std::size_t part_lanes = 8;
#else
constexpr std::size_t part_lanes = 4;
#endif
constexpr std::size_t wide_parts = lanes / part_lanes;

using Part = float __attribute__((vector_size(part_lanes * 4)));
using PartWords = std::uint32_t __attribute__((vector_size(part_lanes * 4)));

struct Wide {
  Part parts[wide_parts];
};

// All ones or all zeros in each lane.
struct WideMask {
  PartWords parts[wide_parts];
};

// In place of a mask of all ones.
struct AllLanes {};

#define SENNIT_INLINE_LAMBDA __attribute__((always_inline))

template <typename Result = Wide, typename Make>
SENNIT_INLINE Result by_parts(Make make) {
  Result result;
#pragma GCC unroll 4
  for (std::size_t part = 0; part < wide_parts; part++) result.parts[part] = make(part);
  return result;
}

// Not 0 + x, which is something else for -0, so that it would be added.
SENNIT_INLINE Wide wide(float x) {
  return by_parts([&](std::size_t) SENNIT_INLINE_LAMBDA { return x - Part{}; });
}
SENNIT_INLINE Wide load_wide(const float* from) {
  return by_parts([&](std::size_t part) SENNIT_INLINE_LAMBDA {
    Part x;
    std::memcpy(&x, from + part * part_lanes, sizeof x);
    return x;
  });
}
SENNIT_INLINE void store(float* to, const Wide& x) {
#pragma GCC unroll 4
  for (std::size_t part = 0; part < wide_parts; part++)
    std::memcpy(to + part * part_lanes, &x.parts[part], sizeof(Part));
}
SENNIT_INLINE Floats floats_of(const Wide& x) {
  Floats same;
  std::memcpy(&same, &x, sizeof same);
  return same;
}

SENNIT_INLINE Wide wide_of(Floats x) {
  Wide same;
  std::memcpy(&same, &x, sizeof same);
  return same;
}

SENNIT_INLINE Wide operator+(const Wide& x, const Wide& y) {
  return by_parts([&](std::size_t part) SENNIT_INLINE_LAMBDA { return x.parts[part] + y.parts[part]; });
}
SENNIT_INLINE Wide operator-(const Wide& x, const Wide& y) {
  return by_parts([&](std::size_t part) SENNIT_INLINE_LAMBDA { return x.parts[part] - y.parts[part]; });
}
SENNIT_INLINE Wide operator*(const Wide& x, const Wide& y) {
  return by_parts([&](std::size_t part) SENNIT_INLINE_LAMBDA { return x.parts[part] * y.parts[part]; });
}
SENNIT_INLINE Wide operator/(const Wide& x, const Wide& y) {
  return by_parts([&](std::size_t part) SENNIT_INLINE_LAMBDA { return x.parts[part] / y.parts[part]; });
}

// x · y + z with one rounding.
SENNIT_INLINE Part fused(Part x, Part y, Part z) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(x, y, z);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(x, y, z);
#elif defined(__aarch64__)
  return vfmaq_f32(z, x, y);
#else
  for (std::size_t lane = 0; lane < part_lanes; lane++) z[lane] = __builtin_fmaf(x[lane], y[lane], z[lane]);
  return z;
#endif
}
SENNIT_INLINE Wide fused(const Wide& x, const Wide& y, const Wide& z) {
  return by_parts([&](std::size_t part)
                      SENNIT_INLINE_LAMBDA { return fused(x.parts[part], y.parts[part], z.parts[part]); });
}

// Lanes from `begin` up to below `end`.
SENNIT_INLINE WideMask lanes_in(std::uint32_t begin, std::uint32_t end) {
  alignas(64) static constexpr std::uint32_t numbers[lanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return by_parts<WideMask>([&](std::size_t part) SENNIT_INLINE_LAMBDA {
    PartWords lane;
    std::memcpy(&lane, numbers + part * part_lanes, sizeof lane);
    return reinterpret_cast<PartWords>(lane >= begin) & reinterpret_cast<PartWords>(lane < end);
  });
}
SENNIT_INLINE Wide only(const Wide& x, const WideMask& mask) {
  return by_parts([&](std::size_t part) SENNIT_INLINE_LAMBDA {
    return reinterpret_cast<Part>(reinterpret_cast<PartWords>(x.parts[part]) & mask.parts[part]);
  });
}
SENNIT_INLINE Wide choose(const WideMask& mask, const Wide& yes, const Wide& no) {
  return by_parts([&](std::size_t part)
                      SENNIT_INLINE_LAMBDA { return mask.parts[part] ? yes.parts[part] : no.parts[part]; });
}
// The greater one; y where x is NaN or equal, and where y is.
SENNIT_INLINE Part greater(Part x, Part y) {
#if defined(__AVX512F__)
  return _mm512_max_ps(x, y);
#elif defined(__AVX2__)
  return _mm256_max_ps(x, y);
#else
  return x > y ? x : y;
#endif
}
SENNIT_INLINE Part lesser(Part x, Part y) {
#if defined(__AVX512F__)
  return _mm512_min_ps(x, y);
#elif defined(__AVX2__)
  return _mm256_min_ps(x, y);
#else
  return x < y ? x : y;
#endif
}
SENNIT_INLINE Wide greater(const Wide& x, const Wide& y) {
  return by_parts([&](std::size_t part) SENNIT_INLINE_LAMBDA { return greater(x.parts[part], y.parts[part]); });
}
SENNIT_INLINE Wide lesser(const Wide& x, const Wide& y) {
  return by_parts([&](std::size_t part) SENNIT_INLINE_LAMBDA { return lesser(x.parts[part], y.parts[part]); });
}

// 1 / x, rounded to nearest even, for x from 1 to 2^126. A division takes 16 cycles. Steps of Newton's method with
// fused multiply-adds end with the same bits (Markstein, 1990). A test compares all fractions.
SENNIT_INLINE Wide reciprocal(const Wide& x) {
#if defined(__AVX512F__)
  const __m512 one = _mm512_set1_ps(1.0f), by = x.parts[0];
  __m512 y = _mm512_rcp14_ps(by);
  // Upwards: from below, 1 / 1.1…1 in binary would end in the middle of two numbers.
  y = _mm512_fmadd_round_ps(_mm512_fnmadd_ps(by, y, one), y, y, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
  return {{_mm512_fmadd_ps(_mm512_fnmadd_ps(by, y, one), y, y)}};
#else
  return wide(1.0f) / x;
#endif
}

SENNIT_INLINE Wide only(const Wide& x, AllLanes) { return x; }
SENNIT_INLINE Wide choose(AllLanes, const Wide& yes, const Wide&) { return yes; }

// 16 rows of 16 columns from one place to another, rows as columns. Strides are in floats; any 32 bits are moved as
// they are.
SENNIT_INLINE void transpose(const float* from, std::size_t from_stride, float* to, std::size_t to_stride) {
#if defined(__AVX512F__)
  __m512i a[lanes], b[lanes];
#pragma GCC unroll 16
  for (std::size_t row = 0; row < lanes; row++) a[row] = _mm512_loadu_si512(from + row * from_stride);
    // Pairs of rows are interleaved, then pairs of pairs: quarter q of b[4 g + m] is column 4 q + m of rows 4 g to 4 g
    // + 3.
#pragma GCC unroll 8
  for (std::size_t row = 0; row < lanes; row += 2) {
    b[row] = _mm512_unpacklo_epi32(a[row], a[row + 1]);
    b[row + 1] = _mm512_unpackhi_epi32(a[row], a[row + 1]);
  }
#pragma GCC unroll 4
  for (std::size_t row = 0; row < lanes; row += 4) {
    a[row] = _mm512_unpacklo_epi64(b[row], b[row + 2]);
    a[row + 1] = _mm512_unpackhi_epi64(b[row], b[row + 2]);
    a[row + 2] = _mm512_unpacklo_epi64(b[row + 1], b[row + 3]);
    a[row + 3] = _mm512_unpackhi_epi64(b[row + 1], b[row + 3]);
  }
#pragma GCC unroll 4
  for (std::size_t m = 0; m < 4; m++) {
    const __m512i even_low = _mm512_shuffle_i32x4(a[m], a[m + 4], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(a[m], a[m + 4], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(a[m + 8], a[m + 12], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(a[m + 8], a[m + 12], 0xdd);
    _mm512_storeu_si512(to + m * to_stride, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
    _mm512_storeu_si512(to + (m + 4) * to_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_si512(to + (m + 8) * to_stride, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    _mm512_storeu_si512(to + (m + 12) * to_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
#else
  for (std::size_t row = 0; row < lanes; row++)
    for (std::size_t column = 0; column < lanes; column++)
      std::memcpy(to + column * to_stride + row, from + row * from_stride + column, sizeof(float));
#endif
}

// e^x (docs/reference/attention.md); below -87 and above 87 that of the limit. NaN stays NaN.
SENNIT_INLINE Wide exponential(Wide x) {
  x = lesser(wide(87.0f), greater(wide(-87.0f), x));
  // Added and taken away, it rounds to an integer, which stands in the low bits in between.
  const Wide shift = wide(0x1.8p23f);
  const Wide shifted = fused(x, wide(0x1.715476p+0f), shift), n = shifted - shift;
  const Wide r = fused(n, wide(-0x1.7f7d1cp-20f), fused(n, wide(-0x1.62e4p-1f), x));
  Wide p = wide(0x1.6a244cp-10f);
  p = fused(p, r, wide(0x1.1239d4p-7f));
  p = fused(p, r, wide(0x1.5558f2p-5f));
  p = fused(p, r, wide(0x1.555492p-3f));
  p = fused(p, r, wide(0x1.fffffcp-2f));
  p = fused(p * r, r, r) + wide(1.0f);
  return p * by_parts([&](std::size_t part) SENNIT_INLINE_LAMBDA {
           const PartWords bits = reinterpret_cast<PartWords>(shifted.parts[part]);
           return reinterpret_cast<Part>((bits - 0x4b400000u + 127u) << 23);
         });
}

}  // namespace sennit::kernels::SENNIT_ISA
