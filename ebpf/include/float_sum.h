// SPDX-License-Identifier: Apache-2.0
// The sum of two float32 in integer arithmetic, for BPF programs, which have no floating point. The bits are those of
// IEEE 754 with rounding to nearest, ties to even, as hosts compute them: subnormals, signed zeros, infinities, too. A
// sum with a NaN is that NaN, made quiet, the first one of two; the NaN of infinities of opposite signs is x86's.
// The algorithm is the textbook one (Muller et al., Handbook of Floating-Point Arithmetic, section 7.3): align, add,
// normalise, round. 32 bits below the last bit of the result hold what alignment shifts out, and the lowest of them
// tells whether anything was lost, so one rounding at the end is exact.
#pragma once

#include <linux/types.h>

#define FLOAT_SUM static inline __attribute__((always_inline))
#define FLOAT_SIGN 0x80000000u
#define FLOAT_INFINITY 0x7f800000u
#define FLOAT_QUIET 0x00400000u
#define FLOAT_HIDDEN 0x00800000u  // the leading bit, which normal numbers do not store
#define FLOAT_INDEFINITE 0xffc00000u

FLOAT_SUM __u32 float_sum(__u32 a, __u32 b) {
  const __u32 size_a = a & ~FLOAT_SIGN, size_b = b & ~FLOAT_SIGN;
  if (size_a > FLOAT_INFINITY) return a | FLOAT_QUIET;
  if (size_b > FLOAT_INFINITY) return b | FLOAT_QUIET;
  const int is_swapped = size_a < size_b;
  const __u32 large = is_swapped ? b : a, small = is_swapped ? a : b;
  const __u32 size_large = large & ~FLOAT_SIGN, size_small = small & ~FLOAT_SIGN;
  const __u32 is_difference = (a ^ b) & FLOAT_SIGN;
  if (size_large == FLOAT_INFINITY) return size_small == FLOAT_INFINITY && is_difference ? FLOAT_INDEFINITE : large;
  // A subnormal has the exponent 1, without the hidden bit.
  __u32 exponent = size_large >> 23, exponent_small = size_small >> 23;
  __u64 sum = (__u64)((size_large & (FLOAT_HIDDEN - 1)) | (exponent ? FLOAT_HIDDEN : 0)) << 32;
  __u64 other = (__u64)((size_small & (FLOAT_HIDDEN - 1)) | (exponent_small ? FLOAT_HIDDEN : 0)) << 32;
  exponent += !exponent;
  exponent_small += !exponent_small;
  __u32 shift = exponent - exponent_small;
  shift = shift > 57 ? 57 : shift;
  const __u64 aligned = other >> shift;
  other = aligned | (aligned << shift != other);
  sum = is_difference ? sum - other : sum + other;
  if (!sum) return is_difference ? 0 : large & FLOAT_SIGN;  // x - x is +0, -0 + -0 is -0
  if (sum >> 56) {
    sum = sum >> 1 | (sum & 1);
    exponent++;
  } else {
    // To the left until the hidden bit is there, or the exponent is that of subnormals.
    for (__u32 step = 32; step; step >>= 1)
      if (!(sum >> (56 - step)) && exponent > step) {
        sum <<= step;
        exponent -= step;
      }
  }
  // Without the hidden bit, the number is subnormal, and its exponent is stored as 0. A carry of the rounding goes into
  // the exponent, as it should, up to infinity.
  __u64 result = ((__u64)(exponent - 1) << 55) + sum;
  const __u64 rest = result & 0xffffffffu, odd = result >> 32 & 1;
  result = (result >> 32) + (rest + odd > 0x80000000u);
  return (result > FLOAT_INFINITY ? FLOAT_INFINITY : (__u32)result) | (large & FLOAT_SIGN);
}

// bfloat16 is the upper half of a float32. Sums are kept in float32 and rounded once, to nearest, ties to even.
FLOAT_SUM __u16 bfloat_of(__u32 bits) {
  if ((bits & ~FLOAT_SIGN) > FLOAT_INFINITY) return 0x7fc0;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
