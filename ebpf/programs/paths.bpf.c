// SPDX-License-Identifier: Apache-2.0
// The session `paths` (docs/how-to/trace.md): what each path of each flow carries and loses, and its round trips.
//
// One thread at a time drives a flow, so an entry has one writer and need not be per CPU. Additions are atomic because
// threads of several groups may have the same ranks.
#include "slots.h"
#include "tracepoint.h"

#define PATHS_MAX 65536

// Times are kept by state. States without a place of their own share the last: another version of sennit may have more,
// and another user's process may write any number.
#define STATES 8

struct path_key {
  __u32 process, rank, peer, path;
};

struct path {
  __u64 sent_packets, sent_bytes, retransmitted_packets;  // retransmitted packets are sent packets too
  __u64 received_packets, received_bytes, duplicate_packets;
  __u64 lost_packets;
  __u64 state_changes, state_ns[STATES];
  __u64 state_since_ns, seen_ns;  // seen_ns: the last round trip or change of state
  __u32 state, unused;
  __u32 rtt_us[SLOTS];
};

struct {
  __uint(type, BPF_MAP_TYPE_HASH);
  __uint(map_flags, BPF_F_NO_PREALLOC);
  __uint(max_entries, PATHS_MAX);
  __type(key, struct path_key);
  __type(value, struct path);
} paths SEC(".maps");

static const struct path fresh;

static __always_inline struct path *path_of(__u32 rank, __u32 peer, __u32 number) {
  struct path_key key = {bpf_get_current_pid_tgid() >> 32, rank, peer, number};

  return entry_of(&paths, &key, &fresh);
}

// A path counts as good until a change of state is seen.
static __always_inline void see(struct path *path, __u64 now_ns) {
  if (path->state_since_ns == 0) path->state_since_ns = now_ns;
  path->seen_ns = now_ns;
}

TRACEPOINT(packet_sent, __u32 rank, __u32 peer, __u32 number, __u32 immediate, __u32 size_bytes, __u32 transmission) {
  struct path *path = path_of(rank, peer, number);

  if (!path) return;
  if (path->state_since_ns == 0) see(path, bpf_ktime_get_ns());
  __sync_fetch_and_add(&path->sent_packets, 1);
  __sync_fetch_and_add(&path->sent_bytes, size_bytes);
  if (transmission > 1) __sync_fetch_and_add(&path->retransmitted_packets, 1);
}

TRACEPOINT(packet_received, __u32 rank, __u32 peer, __u32 number, __u32 immediate, __u32 size_bytes,
           __u32 is_duplicate) {
  struct path *path = path_of(rank, peer, number);

  if (!path) return;
  if (is_duplicate) {
    __sync_fetch_and_add(&path->duplicate_packets, 1);
    return;
  }
  __sync_fetch_and_add(&path->received_packets, 1);
  __sync_fetch_and_add(&path->received_bytes, size_bytes);
}

TRACEPOINT(rtt_sample, __u32 rank, __u32 peer, __u32 number, __u64 rtt_us) {
  struct path *path = path_of(rank, peer, number);

  if (!path) return;
  see(path, bpf_ktime_get_ns());
  __sync_fetch_and_add(&path->rtt_us[slot_of(rtt_us) & (SLOTS - 1)], 1);
}

TRACEPOINT(packet_lost, __u32 rank, __u32 peer, __u32 number, __u32 immediate, __u64 sent_us) {
  struct path *path = path_of(rank, peer, number);

  if (path) __sync_fetch_and_add(&path->lost_packets, 1);
}

TRACEPOINT(path_state, __u32 rank, __u32 peer, __u32 number, __u32 before, __u32 after) {
  struct path *path = path_of(rank, peer, number);

  if (!path) return;
  see(path, bpf_ktime_get_ns());
  __sync_fetch_and_add(&path->state_changes, 1);
  // The compiler must keep the mask: the verifier does not follow the check of the range above.
  if (before >= STATES) before = STATES - 1;
  asm volatile("" : "+r"(before));
  path->state_ns[before & (STATES - 1)] += path->seen_ns - path->state_since_ns;
  path->state_since_ns = path->seen_ns;
  path->state = after;
}

#include TRACEPOINT_ENTRIES
