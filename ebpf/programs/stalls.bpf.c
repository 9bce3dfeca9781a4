// SPDX-License-Identifier: Apache-2.0
// The session `stalls` (docs/how-to/trace.md): what operations wait for. It counts how long each wait took, by kind and
// peer, and for how much of the time a rank had at least one such wait.
#include "slots.h"
#include "tracepoint.h"

#define WAITS_MAX 65536
#define OPEN_MAX 65536

// The first six are the kinds of a step.
enum wait_kind { SEND, RECEIVE, COPY, REDUCE, ENCODE, DECODE, CREDIT, OPERATION, KINDS };
_Static_assert((KINDS & (KINDS - 1)) == 0, "is_kind takes a power of two");

struct wait_key {
  __u32 process, rank, kind, peer;
};

struct wait {
  __u64 time_ns, count;
  __u32 time_us[SLOTS];
};

struct rank_key {
  __u32 process, rank;
};

// The current waits of a rank, and how long it has had any, by kind.
struct rank {
  __u64 busy_ns[KINDS], since_ns[KINDS];
  __u32 open[KINDS];
  __u32 failed;
  __u32 unused;
};

struct open_key {
  __u64 object;  // the address of an operation; for a stall, rank and peer
  __u32 process, step;
};

struct {
  __uint(type, BPF_MAP_TYPE_HASH);
  __uint(map_flags, BPF_F_NO_PREALLOC);
  __uint(max_entries, WAITS_MAX);
  __type(key, struct wait_key);
  __type(value, struct wait);
} waits SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_HASH);
  __uint(map_flags, BPF_F_NO_PREALLOC);
  __uint(max_entries, WAITS_MAX);
  __type(key, struct rank_key);
  __type(value, struct rank);
} ranks SEC(".maps");

// Steps of failed operations never end. Newer entries replace them.
struct {
  __uint(type, BPF_MAP_TYPE_LRU_HASH);
  __uint(max_entries, OPEN_MAX);
  __type(key, struct open_key);
  __type(value, __u64);
} begun SEC(".maps");

#define OPERATION_STEP 0xffffffffu
#define STALL_STEP 0xfffffffeu
#define NO_PEER 0xffffffffu

static const struct wait fresh_wait;
static const struct rank fresh_rank;

static __always_inline __u32 this_process(void) { return bpf_get_current_pid_tgid() >> 32; }

static __always_inline struct rank *rank_of(__u32 number) {
  struct rank_key key = {this_process(), number};

  return entry_of(&ranks, &key, &fresh_rank);
}

// For eight kinds, clang tests a mask in place of `kind < KINDS`, and the verifier does not learn from that.
static __always_inline int is_kind(__u32 *kind) {
  __u32 given = *kind;

  barrier_var(given);
  *kind = given & (KINDS - 1);
  return given == *kind;
}

static __always_inline void begin(__u32 rank_number, __u64 object, __u32 step, __u32 kind) {
  struct open_key key = {object, this_process(), step};
  __u64 now_ns = bpf_ktime_get_ns();
  struct rank *rank = rank_of(rank_number);

  bpf_map_update_elem(&begun, &key, &now_ns, BPF_ANY);
  if (rank && is_kind(&kind) && __sync_fetch_and_add(&rank->open[kind], 1) == 0) rank->since_ns[kind] = now_ns;
}

static __always_inline void close_kind(struct rank *rank, __u32 kind, __u64 now_ns) {
  rank->busy_ns[kind] += now_ns - rank->since_ns[kind];
}

static __always_inline void end(__u32 rank_number, __u64 object, __u32 step, __u32 kind, __u32 peer) {
  struct open_key key = {object, this_process(), step};
  struct wait_key wait_key = {key.process, rank_number, kind, peer};
  __u64 now_ns = bpf_ktime_get_ns(), time_ns, *since_ns = bpf_map_lookup_elem(&begun, &key);
  struct rank *rank;
  struct wait *wait;

  if (!since_ns || !is_kind(&kind)) {
    count_unmatched();
    return;
  }
  time_ns = now_ns - *since_ns;
  bpf_map_delete_elem(&begun, &key);
  rank = rank_of(rank_number);
  if (rank && __sync_fetch_and_add(&rank->open[kind], -1) == 1) close_kind(rank, kind, now_ns);
  wait = entry_of(&waits, &wait_key, &fresh_wait);
  if (!wait) return;
  __sync_fetch_and_add(&wait->count, 1);
  __sync_fetch_and_add(&wait->time_ns, time_ns);
  __sync_fetch_and_add(&wait->time_us[slot_of(time_ns / 1000) & (SLOTS - 1)], 1);
}

static __always_inline __u64 pair(__u32 rank, __u32 peer) { return (__u64)rank << 32 | peer; }

TRACEPOINT(operation_begin, __u32 rank, __u64 operation, __u64 name, __u64 sent_bytes, __u64 received_bytes,
           __u64 signature, __u64 sequence) {
  begin(rank, operation, OPERATION_STEP, OPERATION);
}

TRACEPOINT(operation_end, __u32 number, __u64 operation, __u32 status, __u64 sequence) {
  struct rank *rank;

  end(number, operation, OPERATION_STEP, OPERATION, NO_PEER);
  rank = rank_of(number);
  if (!rank) return;
  if (status != 0) __sync_fetch_and_add(&rank->failed, 1);
  if (rank->open[OPERATION] != 0) return;
  // When the last operation ends, all its steps have ended, also those that were not reported.
#pragma unroll
  for (__u32 kind = SEND; kind <= DECODE; ++kind) {
    if (rank->open[kind] == 0) continue;
    close_kind(rank, kind, bpf_ktime_get_ns());
    rank->open[kind] = 0;
  }
}

TRACEPOINT(step_begin, __u32 rank, __u64 operation, __u32 step, __u32 kind, __u32 peer, __u64 size_bytes) {
  begin(rank, operation, step, kind);
}

TRACEPOINT(step_end, __u32 rank, __u64 operation, __u32 step, __u32 kind, __u32 peer, __u64 size_bytes) {
  end(rank, operation, step, kind, kind == SEND || kind == RECEIVE ? peer : NO_PEER);
}

TRACEPOINT(credit_stall_begin, __u32 rank, __u32 peer, __u64 granted_packets) {
  begin(rank, pair(rank, peer), STALL_STEP, CREDIT);
}

TRACEPOINT(credit_stall_end, __u32 rank, __u32 peer, __u64 granted_packets) {
  end(rank, pair(rank, peer), STALL_STEP, CREDIT, peer);
}

#include TRACEPOINT_ENTRIES
