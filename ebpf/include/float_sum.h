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

// One of the two is a NaN or infinite.
FLOAT_SUM __u32 float_sum_of_specials(__u32 a, __u32 b) {
  const __u32 size_a = a & ~FLOAT_SIGN, size_b = b & ~FLOAT_SIGN;
  if (size_a > FLOAT_INFINITY) return a | FLOAT_QUIET;
  if (size_b > FLOAT_INFINITY) return b | FLOAT_QUIET;
  if (size_a == size_b && a != b) return FLOAT_INDEFINITE;
  return size_a == FLOAT_INFINITY ? a : b;
}

// The top bit of a difference says which of two numbers is smaller. A wrong guess of a branch would take as long as the
// rest of a sum. Without the barriers the compiler makes branches of it.
FLOAT_SUM __u64 float_top_bit(__u64 difference) {
  __asm__("" : "+r"(difference));
  difference >>= 63;
  __asm__("" : "+r"(difference));
  return difference;
}

// 1 if the number, which is below 2^63, is 0; else 0.
FLOAT_SUM __u64 float_is_zero(__u64 number) { return float_top_bit(number - 1); }

FLOAT_SUM __u32 float_sum(__u32 a, __u32 b) {
  const __u64 size_a = a & ~FLOAT_SIGN, size_b = b & ~FLOAT_SIGN;
  // All ones if b is larger.
  const __u64 swap = 0 - float_top_bit(size_a - size_b);
  const __u32 large = a ^ ((a ^ b) & (__u32)swap), small = b ^ ((a ^ b) & (__u32)swap);
  const __u32 size_large = large & ~FLOAT_SIGN, size_small = small & ~FLOAT_SIGN;
  if (size_large >= FLOAT_INFINITY) return float_sum_of_specials(a, b);
  const __u64 is_difference = (a ^ b) >> 31;
  // A subnormal has the exponent 1, without the hidden bit.
  __u64 exponent = size_large >> 23;
  const __u64 exponent_small = size_small >> 23;
  const __u64 is_normal = 1 - float_is_zero(exponent), is_normal_small = 1 - float_is_zero(exponent_small);
  __u64 sum = ((__u64)(size_large & (FLOAT_HIDDEN - 1)) | is_normal << 23) << 32;
  __u64 other = ((__u64)(size_small & (FLOAT_HIDDEN - 1)) | is_normal_small << 23) << 32;
  exponent += 1 - is_normal;
  __u64 shift = exponent - (exponent_small + 1 - is_normal_small);
  shift = shift > 57 ? 57 : shift;
  const __u64 aligned = other >> shift;
  other = aligned | (1 - float_is_zero(other - (aligned << shift)));
  sum += (other ^ (0 - is_difference)) + is_difference;
  if (!sum) return is_difference ? 0 : large & FLOAT_SIGN;  // x - x is +0, -0 + -0 is -0
  const __u64 carry = sum >> 56;
  sum = sum >> carry | (sum & carry);
  exponent += carry;
  if (!(sum >> 55)) {
    // To the left until the hidden bit is there, or the exponent is that of subnormals.
    __u64 rest = sum;
    shift = 0;
    for (__u32 bit = 6; bit-- > 0;) {
      const __u64 step = float_is_zero(rest >> (56 - (1u << bit))) << bit;
      rest <<= step;
      shift += step;
    }
    shift = shift < exponent ? shift : exponent - 1;
    sum <<= shift;
    exponent -= shift;
  }
  // Without the hidden bit, the number is subnormal, and its exponent is stored as 0. A carry of the rounding goes into
  // the exponent, as it should, up to infinity.
  __u64 result = ((exponent - 1) << 55) + sum;
  const __u64 rest = result & 0xffffffffu, odd = result >> 32 & 1;
  result = (result >> 32) + float_top_bit(0x80000000u - rest - odd);
  return (result > FLOAT_INFINITY ? FLOAT_INFINITY : (__u32)result) | (large & FLOAT_SIGN);
}

// bfloat16 is the upper half of a float32. Sums are kept in float32 and rounded once, to nearest, ties to even.
FLOAT_SUM __u16 bfloat_of(__u32 bits) {
  if ((bits & ~FLOAT_SIGN) > FLOAT_INFINITY) return 0x7fc0;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
