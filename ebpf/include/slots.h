// SPDX-License-Identifier: Apache-2.0
// A histogram's slot for a value: eight to every doubling, so that a percentile read from it is right to 1/16. The
// other half is runtime/trace/histogram.py. (ebpf/programs/slots.bcc.h is the same for bcc.)
#pragma once

#include <linux/types.h>

#define SLOTS 256  // the last one begins at 4.6 hours, in microseconds

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
