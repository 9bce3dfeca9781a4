// SPDX-License-Identifier: Apache-2.0
// How a slot of the ring of batches changes hands between processors that fill it and the process that reads it. For
// BPF programs and for the native core alike. offload/csrc/tests/test_feed_slot.cpp tries every interleaving.
//
// Batch, row and owner are in one word. Whoever swaps the bit FEED_SLOT_OWNED in owns everything else in the slot,
// until it stores a word without the bit. A word never comes back with other content behind it: batches and rows only
// grow.
#pragma once

#include <linux/types.h>

#ifdef __bpf__
#define FEED_SLOT_MEMORY __attribute__((address_space(1)))  // an arena
#else
#define FEED_SLOT_MEMORY
#endif

// The model in the tests puts its own here. The swaps of both sides order everything before and behind them.
#ifndef FEED_SLOT_LOAD
#ifdef __bpf__
#define FEED_SLOT_LOAD(word) (*(volatile FEED_SLOT_MEMORY __u64*)(word))
#define FEED_SLOT_SWAP(word, next) __sync_lock_test_and_set(word, next)
#else
#define FEED_SLOT_LOAD(word) __atomic_load_n(word, __ATOMIC_ACQUIRE)
#define FEED_SLOT_SWAP(word, next) __atomic_exchange_n(word, next, __ATOMIC_SEQ_CST)
#endif
#define FEED_SLOT_SWAP_IF(word, expected, next) __sync_val_compare_and_swap(word, expected, next)
#define FEED_SLOT_STORE(place, value) ((place) = (value))
#endif

#define FEED_SLOT_OWNED (1u << 31)  // rows are below 2^20

struct feed_slot {
  // Batch << 32 | owned << 31 | the next row expected, in the sender's numbering.
  __u64 state;
  // Batch << 32 | the highest row received out of sequence since the last accepted packet; row 0: none. If there is
  // one, the reader knows without a timer that the next row is missing. An accepted packet clears it, so a second gap
  // can be told from the first.
  __u64 ahead;
  __u32 rows;  // kept so far
  __u32 one;   // 1, which the verifier does not know
};

enum feed_claim { FEED_CLAIMED, FEED_CLAIM_OLD_BATCH, FEED_CLAIM_LATER_BATCH, FEED_CLAIM_OLD_ROW, FEED_CLAIM_BUSY };

#define FEED_SLOT static inline __attribute__((always_inline))

FEED_SLOT __u32 feed_slot_batch(__u64 state) { return state >> 32; }
FEED_SLOT __u32 feed_slot_row(__u64 state) { return (__u32)state & ~FEED_SLOT_OWNED; }

// Claims the slot for a packet that begins with this row. If that succeeds, `state` is the word to publish if nothing
// changes, and `row` is not below its row.
FEED_SLOT enum feed_claim feed_slot_claim(struct feed_slot FEED_SLOT_MEMORY* slot, __u32 batch, __u32 row,
                                          __u64* state) {
  const __u64 found = FEED_SLOT_LOAD(&slot->state);
  const __s32 later = (__s32)(batch - feed_slot_batch(found));  // batch numbers wrap at 2^32
  if (later) return later < 0 ? FEED_CLAIM_OLD_BATCH : FEED_CLAIM_LATER_BATCH;
  if (found & FEED_SLOT_OWNED) return FEED_CLAIM_BUSY;
  if (row < feed_slot_row(found)) return FEED_CLAIM_OLD_ROW;
  if (FEED_SLOT_SWAP_IF(&slot->state, found, found | FEED_SLOT_OWNED) != found) return FEED_CLAIM_BUSY;
  *state = found;
  return FEED_CLAIMED;
}

// Claims the slot for the reader, whatever batch it has. False: a processor owns the slot at this moment.
FEED_SLOT int feed_slot_claim_any(struct feed_slot FEED_SLOT_MEMORY* slot, __u64* state) {
  const __u64 found = FEED_SLOT_LOAD(&slot->state);
  if (found & FEED_SLOT_OWNED) return 0;
  if (FEED_SLOT_SWAP_IF(&slot->state, found, found | FEED_SLOT_OWNED) != found) return 0;
  *state = found;
  return 1;
}

FEED_SLOT void feed_slot_publish(struct feed_slot FEED_SLOT_MEMORY* slot, __u64 state) {
  FEED_SLOT_SWAP(&slot->state, state);
}

// The owner has appended the records of a packet. Returns the word to publish.
FEED_SLOT __u64 feed_slot_took(struct feed_slot FEED_SLOT_MEMORY* slot, __u64 state, __u32 records, __u32 rows) {
  FEED_SLOT_STORE(slot->rows, rows);
  FEED_SLOT_STORE(slot->ahead, state >> 32 << 32);
  return state + records;
}

// The owner has a packet that begins behind the next row.
FEED_SLOT void feed_slot_skipped(struct feed_slot FEED_SLOT_MEMORY* slot, __u64 state, __u32 row) {
  const __u64 ahead = state >> 32 << 32 | row;
  if (ahead > slot->ahead) FEED_SLOT_STORE(slot->ahead, ahead);
}

// The owner gives the slot to another batch. Returns the word to publish.
FEED_SLOT __u64 feed_slot_opened(struct feed_slot FEED_SLOT_MEMORY* slot, __u32 batch) {
  FEED_SLOT_STORE(slot->rows, 0);
  FEED_SLOT_STORE(slot->ahead, (__u64)batch << 32);
  FEED_SLOT_STORE(slot->one, 1);
  return (__u64)batch << 32;
}

// The row in the word `state` or `ahead` if that is of this batch, else 0.
FEED_SLOT __u32 feed_slot_row_of(const __u64* word, __u32 batch) {
  const __u64 found = FEED_SLOT_LOAD(word);
  return feed_slot_batch(found) == batch ? feed_slot_row(found) : 0;
}
