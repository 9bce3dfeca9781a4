// SPDX-License-Identifier: Apache-2.0
// The memory of an aggregator: jobs, and slots with the leaves of blocks. For the XDP program, which has it as an
// arena, and for the native store alike, so both may work in one memory. docs/decisions/0076-the-network-stores.md.
//
// Memory is a table of jobs, then cells. Every cell has a head and room for the elements of one block. A slot of a job
// of V leaves is 1 + V cells: the first one has the slot's head and the sum, the others have the leaves. All cells have
// heads, though those of leaves are unused. So a head never becomes something else, whatever job its cell belongs to,
// and a program that was late may safely try the lock of a job that has gone.
#pragma once

#include "aggregation.h"

#ifdef __bpf__
#define AGGREGATION_MEMORY __attribute__((address_space(1)))  // an arena
#define AGGREGATION_LOAD(place) (*(volatile typeof(place)*)&(place))
#define AGGREGATION_UNLOCK(word) __sync_lock_test_and_set(word, 0)
#else
#define AGGREGATION_MEMORY
#define AGGREGATION_LOAD(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define AGGREGATION_UNLOCK(word) __atomic_store_n(word, 0, __ATOMIC_RELEASE)
#endif

#define AGGREGATION_JOBS_MAX 64  // a power of two: the low bits of a job's number are its place in the table
#define AGGREGATION_CELL_BYTES 1472
// Where the cells begin, at a multiple of 64.
#define AGGREGATION_CELLS_AT ((sizeof(struct aggregation_job) * AGGREGATION_JOBS_MAX + 63) / 64 * 64)

// Where a rank is, and where it thinks that the aggregator is. Addresses and ports in network byte order.
struct aggregation_endpoint {
  __u16 family;  // 4 or 6; 0: not known yet
  __u16 tag_count;
  __u16 port, own_port;
  __u32 address[4], own_address[4];   // IPv4: the first word
  __u8 hardware[6], own_hardware[6];  // of the frame, if a program has seen it; else zeros
  __u32 tags[2];                      // VLAN tags of the frame
  __u32 interface;                    // its index
};

struct aggregation_job {
  __u64 key;
  __u32 number;  // 0: no job is here. Written last.
  __u32 first_cell;
  __u16 leaves;
  __u16 slots;       // a power of two: twice the window
  __u32 is_touched;  // a packet came since this was cleared
  __u64 reserved;
  struct aggregation_endpoint ranks[AGGREGATION_LEAVES_MAX];
};

enum aggregation_slot_state { AGGREGATION_OPEN, AGGREGATION_SUMMED, AGGREGATION_ANSWERED };

struct aggregation_slot {
  __u64 lock;    // 1: somebody owns everything in the slot
  __u64 block;   // valid if there are leaves
  __u64 leaves;  // bit r: the leaf of rank r is here
  __u32 mark;
  __u8 arithmetic;
  __u8 stripes;
  __u8 state;    // enum aggregation_slot_state
  __u8 repeats;  // of leaves, since the block is complete
  __u8 reserved[32];
};

struct aggregation_cell {
  struct aggregation_slot head;
  __u8 elements[AGGREGATION_BLOCK_BYTES];
};

// What became of a datagram. Each is counted under exactly one.
// clang-format off
#define AGGREGATION_EACH_VERDICT(verdict)                                                         \
  verdict(STORED, stored)                     /* a new leaf */                                     \
  verdict(COMPLETED, completed)               /* the last leaf of its block */                     \
  verdict(REPEATED, repeated)                 /* a leaf once more; the block is not complete */    \
  verdict(REPEATED_LATE, repeated_late)       /* a leaf once more; the block is complete */        \
  verdict(STALE, stale)                       /* a leaf of a block before the one in its slot */   \
  verdict(BUSY, busy)                         /* another processor has the slot */                 \
  verdict(JOINED, joined)                                                                         \
  verdict(LEFT, left)                                                                             \
  verdict(UNKNOWN_JOB, unknown_job)           /* this and the next three: enum aggregation_reason */ \
  verdict(NO_ROOM, no_room)                                                                       \
  verdict(OTHER_PLAN, other_plan)                                                                 \
  verdict(OTHER_JOB, other_job)                                                                   \
  verdict(TRUNCATED, truncated)               /* shorter than it says */                           \
  verdict(FOREIGN, foreign)                   /* another protocol */                               \
  verdict(WRONG_VERSION, wrong_version)                                                           \
  verdict(MALFORMED, malformed)               /* a number that is not allowed */                   \
  verdict(UNEXPECTED, unexpected)             /* what only an aggregator sends */                  \
  verdict(CORRUPT, corrupt)                   /* the checksum is another one */
// clang-format on

#define AGGREGATION_ENUMERATOR(constant, name) AGGREGATION_VERDICT_##constant,
enum aggregation_verdict { AGGREGATION_EACH_VERDICT(AGGREGATION_ENUMERATOR) AGGREGATION_VERDICTS };

#define AGGREGATION_COUNTER(constant, name) __u64 name;
struct aggregation_counters {
  AGGREGATION_EACH_VERDICT(AGGREGATION_COUNTER)
  __u64 answers;                     // sent, copies included
  __u64 unanswered;                  // those that could not be sent
  __u64 received_bytes, sent_bytes;  // of datagrams, without the headers below
};

#define AGGREGATION_SLOT static inline __attribute__((always_inline))

// Where the first cell of a block's slot is.
AGGREGATION_SLOT __u64 aggregation_cell_of(__u32 first_cell, __u32 slots, __u32 leaves, __u64 block) {
  return first_cell + (block & (slots - 1)) * (leaves + 1);
}

AGGREGATION_SLOT int aggregation_try_lock(struct aggregation_slot AGGREGATION_MEMORY* slot) {
  return !AGGREGATION_LOAD(slot->lock) && __sync_val_compare_and_swap(&slot->lock, 0, 1) == 0;
}

AGGREGATION_SLOT void aggregation_unlock(struct aggregation_slot AGGREGATION_MEMORY* slot) {
  AGGREGATION_UNLOCK(&slot->lock);
}

// What a leaf is to a slot that the caller has locked. If it belongs there (STORED, REPEATED), the caller stores its
// elements, and then calls aggregation_note. For a leaf of a new block the slot is emptied before.
AGGREGATION_SLOT enum aggregation_verdict aggregation_judge(struct aggregation_slot AGGREGATION_MEMORY* slot,
                                                            __u64 block, __u32 mark, __u32 arithmetic, __u32 stripes,
                                                            __u32 leaf) {
  if (!slot->leaves || block > slot->block) {
    slot->block = block;
    slot->leaves = 0;
    slot->mark = mark;
    slot->arithmetic = arithmetic;
    slot->stripes = stripes;
    slot->state = AGGREGATION_OPEN;
    slot->repeats = 0;
    return AGGREGATION_VERDICT_STORED;
  }
  if (block < slot->block) return AGGREGATION_VERDICT_STALE;
  if (mark != slot->mark || arithmetic != slot->arithmetic || stripes != slot->stripes)
    return AGGREGATION_VERDICT_OTHER_PLAN;
  if (slot->state != AGGREGATION_OPEN) return AGGREGATION_VERDICT_REPEATED_LATE;
  return slot->leaves >> leaf & 1 ? AGGREGATION_VERDICT_REPEATED : AGGREGATION_VERDICT_STORED;
}

// The leaf is stored. Returns COMPLETED if it was the last one: the caller makes the sum, and then sets the state.
AGGREGATION_SLOT enum aggregation_verdict aggregation_note(struct aggregation_slot AGGREGATION_MEMORY* slot, __u32 leaf,
                                                           __u32 leaves, enum aggregation_verdict verdict) {
  slot->leaves |= 1ull << leaf;
  return slot->leaves == ~0ull >> (64 - leaves) ? AGGREGATION_VERDICT_COMPLETED : verdict;
}
