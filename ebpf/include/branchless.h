// SPDX-License-Identifier: Apache-2.0
// Choices without branches, for BPF. Branches cost twice there: features look random to the branch predictor, and the
// verifier walks every path. In a loop it merges two paths only if no register differs, so a constant on one path and a
// computed number on the other double the paths at every choice.
#pragma once

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "operators.h"

#define CHOICE static __always_inline

// Hides from the compiler how a number was computed. Otherwise it would turn the arithmetic back into branches, before
// or after a shift.
#define OPAQUE(number) asm("" : "+r"(number))

// 1 if a < b, else 0; both below 2^63. Multiply by it: where a mask meets a constant, Linux since 6.18 forks the
// verifier's state instead.
CHOICE __u64 bit_below(__u64 a, __u64 b) {
  __u64 difference = a - b;
  OPAQUE(difference);
  difference >>= 63;
  OPAQUE(difference);
  return difference;
}

// All ones if a < b, else 0; both below 2^63.
CHOICE __u64 mask_below(__u64 a, __u64 b) {
  __s64 difference = (__s64)(a - b);
  OPAQUE(difference);
  difference >>= 63;
  OPAQUE(difference);
  return (__u64)difference;
}

// All ones if a < b, else 0, for any signed numbers (Warren, Hacker's Delight, section 2-12).
CHOICE __u64 mask_less(__s64 a, __s64 b) {
  __u64 x = (__u64)a, y = (__u64)b, difference = x - y;
  __s64 mask = (__s64)(difference ^ ((x ^ y) & (difference ^ x))) >> 63;
  OPAQUE(mask);
  return (__u64)mask;
}

// All ones if the two are equal.
CHOICE __u64 mask_equal(__u64 a, __u64 b) {
  __u64 difference = a ^ b;
  __s64 mask = ~((__s64)(difference | -difference) >> 63);
  OPAQUE(mask);
  return (__u64)mask;
}

CHOICE __u64 choose(__u64 mask, __u64 if_ones, __u64 if_zeros) {
  __u64 difference = if_ones ^ if_zeros;
  OPAQUE(difference);
  return if_zeros ^ (difference & mask);
}

CHOICE __u64 least_of(__u64 a, __u64 b) { return choose(mask_below(a, b), a, b); }

CHOICE __s64 clamp_branchless(__s64 value, __s64 low, __s64 high) {
  __u64 raised = choose(mask_less(value, low), (__u64)low, (__u64)value);
  return (__s64)choose(mask_less(high, (__s64)raised), (__u64)high, raised);
}

// The bits of a float32 as an integer in the order of the numbers, with -0 just below +0. Not for NaN.
CHOICE __u32 float_key(__u32 bits) {
  __u64 is_negative = bits >> 31;
  OPAQUE(is_negative);
  return bits ^ (__u32)(0x80000000u + is_negative * 0x7fffffffu);
}

CHOICE __u64 mask_nan(__u32 bits) { return mask_below(0x7f800000u, bits & 0x7fffffffu); }

// The keys of the infinities. float_key puts NaN outside this range.
#define KEY_LEAST 0x007fffffu
#define KEY_GREATEST 0xff800000u

// std::clamp of a float32. `low_key` is the least key not below `low_bits`, `high_key` the greatest not above
// `high_bits`.
CHOICE __u32 clamp_float(__u32 bits, __u32 low_bits, __u32 low_key, __u32 high_bits, __u32 high_key) {
  __u32 key = float_key(bits);
  // Unsigned: a key below the first bound wraps around to a large number. NaN is in neither range.
  __u64 below = mask_below((__u32)(key - KEY_LEAST), low_key - KEY_LEAST);
  __u64 above = mask_below((__u32)(key - high_key - 1), KEY_GREATEST - high_key);
  return (__u32)choose(above, high_bits, choose(below, low_bits, bits));
}

// floor_mod of operators.h.
CHOICE __s64 floor_mod_branchless(__s64 value, __s64 divisor) {
  __s64 remainder = value % divisor;
  __u64 is_negative = (__u64)remainder >> 63;
  OPAQUE(is_negative);
  return remainder + (__s64)is_negative * divisor;
}

// 1.0f for any byte but 0.
CHOICE __u32 label_of(__u8 byte) { return (__u32)bit_below(0, byte) * 0x3f800000u; }
