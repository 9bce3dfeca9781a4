// SPDX-License-Identifier: Apache-2.0
// Packets between ranks and an aggregator, for BPF programs and for the native core alike.
// docs/reference/aggregation.md specifies them; docs/decisions/0076-the-network-stores.md says why they are so.
//
// A packet is the payload of one UDP datagram: this header, then whole stripes of 32 bytes. Numbers of the header are
// big-endian, elements little-endian, as they lie in the memory of the ranks.
#pragma once

#include <linux/types.h>

#define AGGREGATION_MAGIC 0x5e18
#define AGGREGATION_VERSION 1
#define AGGREGATION_STRIPE_BYTES 32
// A block: 352 elements of 4 bytes. With this header, that of UDP and that of IPv6, 1,496 bytes.
#define AGGREGATION_STRIPES_MAX 44
#define AGGREGATION_BLOCK_BYTES (AGGREGATION_STRIPES_MAX * AGGREGATION_STRIPE_BYTES)
#define AGGREGATION_LEAVES_MAX 64
#define AGGREGATION_WINDOW_MAX 1024

enum aggregation_kind {
  AGGREGATION_LEAF = 0,     // rank to aggregator: a leaf of a block
  AGGREGATION_RESULT = 1,   // back: the sum of all leaves of the block
  AGGREGATION_WAITING = 2,  // back, to a repeated leaf: the block is not complete
  AGGREGATION_JOIN = 3,     // rank to aggregator: one stripe, `aggregation_join`
  AGGREGATION_JOINED = 4,   // back: the number of the job, and the same stripe with what is granted
  AGGREGATION_REFUSED = 5,  // back: why not, one stripe, `aggregation_refusal`
  AGGREGATION_LEAVE = 6,    // rank to aggregator: the group has ended
};

enum aggregation_arithmetic {
  AGGREGATION_SUM_F32 = 0,
  AGGREGATION_SUM_I32 = 1,
  AGGREGATION_SUM_BF16 = 2,  // sums in float32, rounded once
};

enum aggregation_reason {
  AGGREGATION_UNKNOWN_JOB = 1,  // no job has this number and key
  AGGREGATION_NO_ROOM = 2,      // for another job
  AGGREGATION_OTHER_PLAN = 3,   // the leaf has another mark, arithmetic or size than the leaves that came before
  AGGREGATION_OTHER_JOB = 4,    // the job of this key has another number of leaves
};

struct aggregation_header {
  __u16 magic;
  __u8 version;
  __u8 kind;
  __u32 job;        // its number at the aggregator; 0 in a JOIN
  __u64 key;        // random, the same for all ranks of the job
  __u64 block;      // counted over all operations of the job
  __u32 mark;       // what the ranks must agree on: a digest of the operation's signature
  __u16 leaf;       // which leaf of the tree: the rank
  __u8 arithmetic;  // enum aggregation_arithmetic
  __u8 stripes;     // behind the header
  __u64 checksum;   // XXH64 of the 32 bytes before it and of the stripes
};

struct aggregation_join {
  __u16 leaves;  // of the tree: ranks
  __u16 window;  // blocks that a rank has in flight at most: a power of two
  __u8 reserved[28];
};

struct aggregation_refusal {
  __u16 reason;
  __u8 reserved[30];
};
