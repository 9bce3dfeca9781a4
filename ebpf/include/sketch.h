// SPDX-License-Identifier: Apache-2.0
// A count-min sketch of ids in an arena (Cormode and Muthukrishnan 2005). offload/sketch.py is the reference and
// explains the numbers.
#pragma once

#include "feed_receiver.h"
#include "operators.h"

#define SKETCH_SAMPLE_SEED 0x53414d504c45ull
#define SKETCH_HASH_SEED 0x534b45544348ull

// The sampled row among the rows stratum << shift to (stratum + 1 << shift) - 1.
static __always_inline __u64 sketch_row_of(__u32 batch, __u64 stratum, __u32 shift) {
  __u64 draw = splitmix64(SKETCH_SAMPLE_SEED, (__u64)batch << 32 | stratum);
  return (stratum << shift) + (draw & ((1ull << shift) - 1));
}

// Counts one id: adds 1 to a cell in each of `depth` lines of `width` cells. The lines begin at this arena address.
static __always_inline void sketch_count(__u64 lines, __u64 id, __u32 depth, __u32 width) {
  const __u64 hash = splitmix64(SKETCH_HASH_SEED, id);
#pragma unroll
  for (__u32 line = 0; line < depth; line++) {
    __u64 cell = (hash >> 16 * line) & (width - 1);
    (*(__u32 __arena*)(lines + 4ull * width * line + 4 * cell))++;
  }
}
