// SPDX-License-Identifier: Apache-2.0
// What all generated programs have in common: they find the packets for their port, read them, and verify them.
#pragma once

#include "checksum.h"
#include "feed.h"
#include "feed_slot.h"

// BPF_MAP_TYPE_ARENA: the headers of a distribution may be older than its kernel.
#define FEED_MAP_TYPE_ARENA 33
#define __arena __attribute__((address_space(1)))

// Leaves a loop that runs too long (may_goto, Linux 6.9). Unlike bpf_for, it lets the verifier keep the loop's counter
// in a register, which makes a loop over ids three times as fast.
#define STOP_ENDLESS(label) asm volatile goto("may_goto %l[" #label "]" :: ::label)

// A copy whose origin the compiler does not know. Otherwise it would compute the addresses of all columns before the
// loop over records, and has no room for so many: a BPF program's stack has 512 bytes.
#define FORGET(copy, number) \
  __u64 copy = number;       \
  asm volatile("" : "+r"(copy))

// FEED_BYTES declares `data`, where the bytes of a packet are. FEED_INSIDE declares `place`, the address of `size` of
// them from the offset `at` on, or jumps to `malformed`. Without the barrier the compiler derives this check from
// another one, and the verifier loses the connection.
// Every offset stays below this, so the verifier knows that adding a width does not overflow.
#define FEED_OFFSET_MAX 0x3fff
#ifndef FEED_FRAGMENTS
#define FEED_BYTES(context, if_none) \
  void *data = (void*)(long)(context)->data, *data_end = (void*)(long)(context)->data_end
#define FEED_INSIDE(place, at, size)          \
  asm volatile("" : "+r"(at));                \
  if ((at) > FEED_OFFSET_MAX) goto malformed; \
  const __u8* place = data + (at);            \
  if ((void*)(place + (size)) > data_end) goto malformed

// Whether the packet has this many bytes.
static __always_inline int feed_has(struct xdp_md* context, __u32 size) {
  return size <= (__u32)((long)context->data_end - (long)context->data);
}
#else
// Jumbo frames come in several pieces, and a program has the address of the first alone (xdp.frags, Linux 5.18). So the
// packet is copied, and read there. What is behind its end are bytes of earlier packets: a record that reaches into
// them does not end where its packet does, and so is malformed.
struct feed_packet {
  __u8 bytes[FEED_OFFSET_MAX + 1];
};
struct {
  __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
  __uint(max_entries, 1);
  __type(key, __u32);
  __type(value, struct feed_packet);
} packet SEC(".maps");

static __always_inline __u8* feed_packet_bytes(void) {
  __u32 zero = 0;
  struct feed_packet* found = bpf_map_lookup_elem(&packet, &zero);
  return found ? found->bytes : 0;
}

// The verifier wants the context of every function, and the compiler leaves unused arguments out.
#define FEED_BYTES(context, if_none)      \
  asm volatile("" ::"r"(context));        \
  const __u8* data = feed_packet_bytes(); \
  if (!data) if_none
#define FEED_INSIDE(place, at, size)                       \
  asm volatile("" : "+r"(at));                             \
  if ((at) > FEED_OFFSET_MAX + 1 - (size)) goto malformed; \
  const __u8* place = data + (at)

// Whether the packet has this many bytes. It then is where FEED_BYTES says.
static __always_inline int feed_has(struct xdp_md* context, __u32 size) {
  __u8* copy = feed_packet_bytes();
  __u64 there = bpf_xdp_get_buff_len(context);
  if (!copy || there < size || there > FEED_OFFSET_MAX + 1) return 0;
  asm volatile("" : "+r"(there));  // else the compiler makes one comparison of two, which the verifier does not follow
  if (!there) return 0;
  asm volatile("" : "+r"(there));
  return !bpf_xdp_load_bytes(context, 0, copy, there);
}
#endif

// The addresses that packets must have. The process writes them before it attaches the program.
struct feed_destination own;

// feed_find with its result packed into one number. The verifier walks a global function once by itself and assumes
// that it may return any number. So it walks the caller once, not once for each combination of headers.
__attribute__((noinline)) __u64 feed_find_packed(struct xdp_md* context) {
  struct feed_datagram found = feed_find((void*)(long)context->data, (void*)(long)context->data_end, &own);
  return (__u64)found.port << 32 | (__u64)found.bytes << 8 | found.at;
}

// Finds a datagram for this port.
static __always_inline struct feed_datagram feed_find_datagram(struct xdp_md* context, __u16 udp_port) {
  const __u64 packed = feed_find_packed(context);
  struct feed_datagram none = {};
  struct feed_datagram found = {.at = packed & 0xff, .bytes = packed >> 8 & 0xffff, .port = packed >> 32};
  return found.port == udp_port ? found : none;
}

// Whether a datagram and its header are whole.
static __always_inline int feed_is_whole(struct xdp_md* context, struct feed_datagram* found) {
  if (found->bytes < sizeof(struct feed_header)) return 0;
  return feed_has(context, found->at + found->bytes);
}

#define FEED_WORD(place, n) *(const __u64*)((place) + 8 * (n))

// The checksum of the packet from `at` to `end`, with zeros in place of the one that it has.
__attribute__((noinline)) __u64 feed_checksum(struct xdp_md* context, __u64 at, __u64 end) {
  __u64 a = CHECKSUM_SUM_0, b = CHECKSUM_SUM_1, c = CHECKSUM_SUM_2, d = CHECKSUM_SUM_3;
  const __u64 size = end - at;
  FEED_BYTES(context, return 0);
  FEED_INSIDE(header, at, CHECKSUM_STRIPE_BYTES);
  a = checksum_word(a, FEED_WORD(header, 0));
  b = checksum_word(b, FEED_WORD(header, 1));
  c = checksum_word(c, FEED_WORD(header, 2));
  d = checksum_word(d, 0);
  at += CHECKSUM_STRIPE_BYTES;
  while (at + CHECKSUM_STRIPE_BYTES <= end) {
    STOP_ENDLESS(malformed);
    FEED_INSIDE(stripe, at, CHECKSUM_STRIPE_BYTES);
    a = checksum_word(a, FEED_WORD(stripe, 0));
    b = checksum_word(b, FEED_WORD(stripe, 1));
    c = checksum_word(c, FEED_WORD(stripe, 2));
    d = checksum_word(d, FEED_WORD(stripe, 3));
    at += CHECKSUM_STRIPE_BYTES;
  }
  __u64 all = checksum_join(a, b, c, d, size);
  while (at + 8 <= end) {
    STOP_ENDLESS(malformed);
    FEED_INSIDE(word, at, 8);
    all = checksum_tail_word(all, FEED_WORD(word, 0));
    at += 8;
  }
  if (at + 4 <= end) {
    FEED_INSIDE(half, at, 4);
    all = checksum_tail_half(all, *(const __u32*)half);
    at += 4;
  }
  while (at < end) {
    STOP_ENDLESS(malformed);
    FEED_INSIDE(byte, at, 1);
    all = checksum_tail_byte(all, *byte);
    at += 1;
  }
  return checksum_end(all);
malformed:
  return 0;
}
