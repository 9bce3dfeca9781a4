// SPDX-License-Identifier: Apache-2.0
// A program on tracepoints of user space. The source says what happens at a hit, as a function of the tracepoint's
// arguments. ebpf/usdt_entries.py generates a BPF program for each place of the tracepoint; it is included last:
//
//   #include "tracepoint.h"
//   TRACEPOINT(packet_lost, __u32 rank, __u32 peer, ...) { ... }
//   #include TRACEPOINT_ENTRIES
//
#pragma once

#include <linux/bpf.h>
#include <linux/ptrace.h>

#include <bpf/bpf_helpers.h>

#define TRACEPOINT(name, ...) static __attribute__((always_inline, unused)) void name(__VA_ARGS__)

#if __has_include("entries.h")
#define TRACEPOINT_ENTRIES "entries.h"
#else  // compiled without a library: make ebpf
#define TRACEPOINT_ENTRIES "no_entries.h"
#endif

// Pure and not inlined, so an argument that the program does not use is not read.
#define USER_READER(bits)                                                                \
  static __attribute__((noinline, pure, unused)) __u##bits user_u##bits(__u64 address) { \
    __u##bits value = 0;                                                                 \
    bpf_probe_read_user(&value, sizeof value, (const void*)address);                     \
    return value;                                                                        \
  }
USER_READER(8)
USER_READER(16)
USER_READER(32)
USER_READER(64)

// Hits that a session could not count, so that nothing is lost silently: a map was full, or the session had not seen
// the beginning of what ended here.
struct uncounted {
  __u64 map_full;
  __u64 unmatched;
};
struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, 1);
  __type(key, __u32);
  __type(value, struct uncounted);
} uncounted SEC(".maps");

static __attribute__((always_inline, unused)) void count_map_full(void) {
  __u32 only = 0;
  struct uncounted* found = bpf_map_lookup_elem(&uncounted, &only);

  if (found) __sync_fetch_and_add(&found->map_full, 1);
}

static __attribute__((always_inline, unused)) void count_unmatched(void) {
  __u32 only = 0;
  struct uncounted* found = bpf_map_lookup_elem(&uncounted, &only);

  if (found) __sync_fetch_and_add(&found->unmatched, 1);
}

// The entry of a hash map, created from `zero` if it is missing; 0 if the map is full, which is counted.
static __attribute__((always_inline, unused)) void* entry_of(void* map, const void* key, const void* zero) {
  void* found = bpf_map_lookup_elem(map, key);

  if (found) return found;
  bpf_map_update_elem(map, key, zero, BPF_NOEXIST);
  found = bpf_map_lookup_elem(map, key);
  if (!found) count_map_full();
  return found;
}

char licence[] SEC("license") = "GPL";
