// SPDX-License-Identifier: Apache-2.0
// What a program that receives records shares with Python: packet header, slot state, counters and settings.
// docs/reference/records.md specifies the header. Python reads these layouts from BTF; offload/batches.py repeats the
// slot's.
#pragma once

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define FEED_MAGIC 0x5e17
#define FEED_VERSION 1

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

struct feed_header {
  __be16 magic;
  __u8 version;
  __u8 flags;
  __be32 schema_id;
  __be32 session;
  __be32 batch;
  __be32 row;
  __be16 records;
  __be16 body_bytes;
};

struct feed_slot {
  __u32 batch;     // the batch that the slot receives; the reader writes it last when it opens the slot
  __u32 next_row;  // next row expected, in the sender's numbering; a packet that begins elsewhere changes nothing
  __u32 rows;      // rows kept so far
  __u32 busy;      // a processor is filling the slot
  // The highest row received out of sequence since the last accepted packet; 0: none. If it is set, the reader knows
  // without a timer that next_row is missing. An accepted packet clears it, so a second gap can be told from the first.
  __u32 ahead_row;
};

// The verdict on a datagram for the feed's port. Each datagram is counted under exactly one.
// clang-format off
#define FEED_EACH_VERDICT(verdict)          \
  verdict(ACCEPTED, accepted)               \
  verdict(TRUNCATED, truncated)             \
  verdict(FOREIGN, foreign)                 \
  verdict(WRONG_VERSION, wrong_version)     \
  verdict(WRONG_SCHEMA, wrong_schema)       \
  verdict(WRONG_SESSION, wrong_session)     \
  verdict(OVERSIZED, oversized)             \
  verdict(MALFORMED, malformed)             \
  verdict(DUPLICATE, duplicate)             \
  verdict(OUT_OF_SEQUENCE, out_of_sequence) \
  verdict(NO_CREDIT, no_credit)             \
  verdict(BUSY, busy)
// clang-format on

#define FEED_ENUMERATOR(constant, name) FEED_##constant,
enum feed_verdict { FEED_EACH_VERDICT(FEED_ENUMERATOR) FEED_VERDICTS };

// Datagrams by verdict come first, in the order of the enumeration. bpftool shows these names.
#define FEED_COUNTER(constant, name) __u64 name;
struct feed_counters {
  FEED_EACH_VERDICT(FEED_COUNTER)
  __u64 records;     // in accepted packets
  __u64 filtered;    // of these, not kept by the plan
  __u64 body_bytes;  // of accepted packets
};

static __always_inline void feed_count(struct feed_counters* counters, enum feed_verdict verdict) {
  if (verdict < FEED_VERDICTS) ((__u64*)counters)[verdict]++;
}

struct feed_settings {
  __u32 session;
  __u16 udp_port;
  __u16 reserved;
};

// The tag behind the type 0x8100 (C-VLAN) or 0x88A8 (S-VLAN); IEEE 802.1Q, 9.6. A QinQ frame has one of each.
#define FEED_VLAN_TAGS_MAX 2
struct feed_vlan_tag {
  __be16 control;
  __be16 type;
};

// The place of a UDP payload. Fragments, IPv4 options and more VLAN tags are left to the host.
struct feed_datagram {
  __u32 at;     // offset of the payload in the packet; 0: none
  __u32 bytes;  // from the UDP header
  __u32 port;   // destination port
};

static __always_inline struct feed_datagram feed_find_any(void* data, void* data_end) {
  struct feed_datagram none = {};
  struct ethhdr* ether = data;
  struct udphdr* udp;
  if ((void*)(ether + 1) > data_end) return none;
  __be16 type = ether->h_proto;
  void* network = ether + 1;
  __u32 at = sizeof *ether;
#pragma clang loop unroll(full)
  for (__u32 tags = 0; tags < FEED_VLAN_TAGS_MAX; tags++) {
    if (type != bpf_htons(ETH_P_8021Q) && type != bpf_htons(ETH_P_8021AD)) break;
    struct feed_vlan_tag* tag = network;
    if ((void*)(tag + 1) > data_end) return none;
    type = tag->type;
    network = tag + 1;
    at += sizeof *tag;
  }
  if (type == bpf_htons(ETH_P_IPV6)) {
    struct ipv6hdr* ip = network;
    if ((void*)(ip + 1) > data_end || ip->nexthdr != IPPROTO_UDP) return none;
    udp = (void*)(ip + 1);
    at += sizeof *ip + sizeof *udp;
  } else if (type == bpf_htons(ETH_P_IP)) {
    struct iphdr* ip = network;
    if ((void*)(ip + 1) > data_end || ip->protocol != IPPROTO_UDP || ip->ihl != 5) return none;
    if (ip->frag_off & bpf_htons(0x3fff)) return none;  // RFC 791: more fragments, or an offset
    udp = (void*)(ip + 1);
    at += sizeof *ip + sizeof *udp;
  } else {
    return none;
  }
  if ((void*)(udp + 1) > data_end) return none;
  __u32 bytes = bpf_ntohs(udp->len);
  if (bytes < sizeof *udp) return none;
  struct feed_datagram found = {.at = at, .bytes = bytes - sizeof *udp, .port = bpf_ntohs(udp->dest)};
  return found;
}

// feed_find_any with its result packed into one number. The verifier walks a global function once by itself and assumes
// that it may return any number. So it walks the caller once, not once for each combination of headers.
__attribute__((noinline)) __u64 feed_find_packed(struct xdp_md* context) {
  struct feed_datagram found = feed_find_any((void*)(long)context->data, (void*)(long)context->data_end);
  return (__u64)found.port << 32 | (__u64)found.bytes << 8 | found.at;
}

// Finds a datagram for this port.
static __always_inline struct feed_datagram feed_find_datagram(struct xdp_md* context, __u16 udp_port) {
  const __u64 packed = feed_find_packed(context);
  struct feed_datagram none = {};
  struct feed_datagram found = {.at = packed & 0xff, .bytes = packed >> 8 & 0xffff, .port = packed >> 32};
  return found.port == udp_port ? found : none;
}

// Checks all of a header that does not depend on the slot. The caller has checked that it is inside the packet.
static __always_inline enum feed_verdict feed_check_header(const struct feed_header* header, __u32 payload_bytes,
                                                           __u32 schema_id, __u32 session, __u32 batch_rows) {
  if (header->magic != bpf_htons(FEED_MAGIC)) return FEED_FOREIGN;
  if (header->version != FEED_VERSION) return FEED_WRONG_VERSION;
  if (header->schema_id != bpf_htonl(schema_id)) return FEED_WRONG_SCHEMA;
  if (header->session != bpf_htonl(session)) return FEED_WRONG_SESSION;
  __u32 stated = sizeof *header + bpf_ntohs(header->body_bytes);
  if (stated > payload_bytes) return FEED_TRUNCATED;
  if (stated < payload_bytes) return FEED_OVERSIZED;
  __u32 records = bpf_ntohs(header->records), row = bpf_ntohl(header->row);
  if (header->flags || !records || row >= batch_rows || records > batch_rows - row) return FEED_MALFORMED;
  return FEED_ACCEPTED;
}
