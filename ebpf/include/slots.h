// SPDX-License-Identifier: Apache-2.0
// The histogram slot of a value: eight slots for each doubling, so a percentile read from it is accurate to 1/16.
// runtime/trace/histogram.py reads the slots. bcc compiles this too.
#pragma once

#include <linux/types.h>

#define SLOTS 256  // values are microseconds: the last slot begins at 4.6 hours

static inline __attribute__((always_inline)) __u32 slot_of(__u64 value) {
  __u32 exponent = 0, slot;
  __u64 rest = value;

  if (value < 8) return value;
#pragma unroll
  for (__u32 bits = 32; bits; bits >>= 1) {
    if (rest >> bits) {
      rest >>= bits;
      exponent += bits;
    }
  }
  slot = (exponent - 2) * 8 + ((value >> (exponent - 3)) & 7);
  return slot < SLOTS ? slot : SLOTS - 1;
}
