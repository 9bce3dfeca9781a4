// SPDX-License-Identifier: Apache-2.0
// What a program that receives records shares with Python: packet header, counters and settings.
// docs/reference/records.md specifies the header. Python reads these layouts from BTF.
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
#define FEED_VERSION 2

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
  __be64 checksum;
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
  verdict(BUSY, busy)                       \
  verdict(CORRUPT, corrupt)
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

// The destination of packets: the program takes a packet only if both of its addresses are these. Promiscuous
// interfaces, bridges and routers see the packets of others, which go on.
struct feed_destination {
  __u8 hardware[ETH_ALEN];
  __be16 type;        // ETH_P_IPV6 or ETH_P_IP
  __be32 address[4];  // IPv4: the first word
};

// `own`: null for any destination.
static __always_inline struct feed_datagram feed_find(void* data, void* data_end, const struct feed_destination* own) {
  struct feed_datagram none = {};
  struct ethhdr* ether = data;
  struct udphdr* udp;
  if ((void*)(ether + 1) > data_end) return none;
  if (own && (*(__u32*)ether->h_dest != *(__u32*)own->hardware ||
              *(__u16*)(ether->h_dest + 4) != *(__u16*)(own->hardware + 4)))
    return none;
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
  if (own && type != own->type) return none;
  if (type == bpf_htons(ETH_P_IPV6)) {
    struct ipv6hdr* ip = network;
    if ((void*)(ip + 1) > data_end || ip->nexthdr != IPPROTO_UDP) return none;
    const __be32* address = ip->daddr.in6_u.u6_addr32;
    if (own && (address[0] != own->address[0] || address[1] != own->address[1] || address[2] != own->address[2] ||
                address[3] != own->address[3]))
      return none;
    udp = (void*)(ip + 1);
    at += sizeof *ip + sizeof *udp;
  } else if (type == bpf_htons(ETH_P_IP)) {
    struct iphdr* ip = network;
    if ((void*)(ip + 1) > data_end || ip->protocol != IPPROTO_UDP || ip->ihl != 5) return none;
    if (own && ip->daddr != own->address[0]) return none;
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

// Checks whose packet it is, and that it is whole. The caller has checked that the header is inside the packet.
static __always_inline enum feed_verdict feed_check_header(const struct feed_header* header, __u32 payload_bytes,
                                                           __u32 schema_id, __u32 session) {
  if (header->magic != bpf_htons(FEED_MAGIC)) return FEED_FOREIGN;
  if (header->version != FEED_VERSION) return FEED_WRONG_VERSION;
  if (header->schema_id != bpf_htonl(schema_id)) return FEED_WRONG_SCHEMA;
  if (header->session != bpf_htonl(session)) return FEED_WRONG_SESSION;
  __u32 stated = sizeof *header + bpf_ntohs(header->body_bytes);
  if (stated > payload_bytes) return FEED_TRUNCATED;
  if (stated < payload_bytes) return FEED_OVERSIZED;
  return FEED_ACCEPTED;
}

// Checks the rows of a packet that is not corrupt.
static __always_inline enum feed_verdict feed_check_rows(const struct feed_header* header, __u32 batch_rows) {
  __u32 records = bpf_ntohs(header->records), row = bpf_ntohl(header->row);
  if (header->flags || !records || row >= batch_rows || records > batch_rows - row) return FEED_MALFORMED;
  return FEED_ACCEPTED;
}
