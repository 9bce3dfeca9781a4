// SPDX-License-Identifier: Apache-2.0
// The integer arithmetic of the operators, for generated BPF programs and for the native core alike. Plain C, no loops.
// offload/hashing.py and offload/reference.py are the reference; docs/reference/feature-plans.md has the definitions.
#pragma once

#include <linux/types.h>

#define OPERATOR static inline __attribute__((always_inline))

// Thomas Wang's 64-bit mix, as folly's twang_mix64. Shifts and adds of the original are written as the multiplications
// they are: on BPF, which has two-operand instructions, these are a third of the instructions.
OPERATOR __u64 twang_mix64(__u64 key) {
  key = key * ((1ull << 21) - 1) - 1;
  key ^= key >> 24;
  key *= 265;
  key ^= key >> 14;
  key *= 21;
  key ^= key >> 28;
  return key + (key << 31);
}

// CityHash's Hash128to64 (Pike and Alakuijala), as folly's hash_combine of two.
OPERATOR __u64 hash_combine(__u64 first, __u64 second) {
  __u64 a = (second ^ first) * 0x9ddfea08eb382d69ull;
  a ^= a >> 47;
  __u64 b = (first ^ a) * 0x9ddfea08eb382d69ull;
  b ^= b >> 47;
  return b * 0x9ddfea08eb382d69ull;
}

// The remainder with the divisor's sign; the divisor is positive.
OPERATOR __s64 floor_mod(__s64 value, __s64 divisor) {
  __s64 remainder = value % divisor;
  return remainder < 0 ? remainder + divisor : remainder;
}

OPERATOR int float_is_nan(__u32 bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// Number `n` of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
OPERATOR __u64 splitmix64(__u64 seed, __u64 n) {
  __u64 z = seed + (n + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
