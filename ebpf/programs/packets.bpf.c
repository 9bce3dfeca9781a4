// SPDX-License-Identifier: Apache-2.0
// The session `packets` (docs/how-to/trace.md): hands over whole RoCEv2 packets of one flow at an interface. It
// attaches to tcx in both directions, and captured packets go on to the next program.
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define ROCE_PORT 4791  // Annex A17.2
#define GO_ON (-1)      // TCX_NEXT
#define RING_BYTES (32 << 20)
#define ADDRESS_BYTES 16
#define QPN_MASK 0xFFFFFFu
// The base transport header (9.2): opcode, flags, partition, then four bytes, of which the last three are the queue
// pair.
#define QPN_OFFSET 4

enum direction { IN = 1, OUT = 2 };  // numbers of pcap-ng

// The flow to capture. A field is compared if its `has_` is set. IPv4 addresses are mapped to IPv6 (RFC 4291, 2.5.5.2).
const volatile __u32 has_peer, has_qpn, has_source_port;
const volatile __u8 peer[ADDRESS_BYTES];
const volatile __u32 qpn, source_port;

struct head {
  __u64 time_ns;  // CLOCK_MONOTONIC
  __u32 size_bytes;
  __u32 direction;
  __u32 segment_bytes;  // UDP payload of each packet in a super-packet (GSO); 0: a single packet
  __u32 unused;
};

// Puts the type into the object's BTF.
const struct head *head_type __attribute__((unused));

// Records have one of three sizes, because the verifier wants constants.
#define SMALL_BYTES 2048
#define JUMBO_BYTES 9728
#define SUPER_BYTES 65664  // 64 KiB and its Ethernet header, rounded up

// Packets of the flow that were not handed over.
struct missed {
  __u64 ring_full, too_large;
};
struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, 1);
  __type(key, __u32);
  __type(value, struct missed);
} missed SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_RINGBUF);
  __uint(max_entries, RING_BYTES);
} packets SEC(".maps");

// The addresses of a packet.
struct addresses {
  __u8 source[ADDRESS_BYTES], destination[ADDRESS_BYTES];
};

static __always_inline void map_ipv4(__u8 out[ADDRESS_BYTES], __u32 address) {
  __builtin_memset(out, 0, 10);
  out[10] = out[11] = 0xFF;
  __builtin_memcpy(out + 12, &address, 4);
}

static __always_inline __u32 find_udp(struct __sk_buff *skb, struct addresses *addresses) {
  if (skb->protocol == bpf_htons(ETH_P_IP)) {
    struct iphdr header;

    if (bpf_skb_load_bytes(skb, ETH_HLEN, &header, sizeof header) || header.protocol != IPPROTO_UDP) return 0;
    if (header.frag_off & bpf_htons(0x3FFF)) return 0;
    map_ipv4(addresses->source, header.saddr);
    map_ipv4(addresses->destination, header.daddr);
    return ETH_HLEN + header.ihl * 4;
  }
  if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
    struct ipv6hdr header;

    if (bpf_skb_load_bytes(skb, ETH_HLEN, &header, sizeof header) || header.nexthdr != IPPROTO_UDP) return 0;
    __builtin_memcpy(addresses->source, &header.saddr, ADDRESS_BYTES);
    __builtin_memcpy(addresses->destination, &header.daddr, ADDRESS_BYTES);
    return ETH_HLEN + sizeof header;
  }
  return 0;
}

static __always_inline int is_peer(const __u8 address[ADDRESS_BYTES]) {
#pragma unroll
  for (int i = 0; i < ADDRESS_BYTES; ++i)
    if (address[i] != peer[i]) return 0;
  return 1;
}

static __always_inline int is_wanted(struct __sk_buff *skb) {
  struct addresses addresses;
  struct udphdr udp;
  __be32 queue_pair;
  __u32 offset = find_udp(skb, &addresses);

  if (!offset || bpf_skb_load_bytes(skb, offset, &udp, sizeof udp) || udp.dest != bpf_htons(ROCE_PORT)) return 0;
  if (has_source_port && udp.source != bpf_htons(source_port)) return 0;
  if (has_peer && !is_peer(addresses.source) && !is_peer(addresses.destination)) return 0;
  if (bpf_skb_load_bytes(skb, offset + sizeof udp + QPN_OFFSET, &queue_pair, sizeof queue_pair)) return 0;
  return !has_qpn || (bpf_ntohl(queue_pair) & QPN_MASK) == qpn;
}

#define HAND_OVER(SIZE_MAX)                                                                  \
  do {                                                                                       \
    struct {                                                                                 \
      struct head head;                                                                      \
      __u8 bytes[SIZE_MAX];                                                                  \
    } *record = bpf_ringbuf_reserve(&packets, sizeof *record, 0);                            \
    if (!record) {                                                                           \
      __sync_fetch_and_add(&counter->ring_full, 1);                                          \
      return GO_ON;                                                                          \
    }                                                                                        \
    record->head = head;                                                                     \
    if (bpf_skb_load_bytes(skb, 0, record->bytes, size_bytes)) record->head.size_bytes = 0;  \
    bpf_ringbuf_submit(record, 0);                                                           \
    return GO_ON;                                                                            \
  } while (0)

static __always_inline int capture(struct __sk_buff *skb, __u32 direction) {
  __u32 only = 0;
  struct missed *counter = bpf_map_lookup_elem(&missed, &only);
  __u32 size_bytes = skb->len;

  if (!counter || !is_wanted(skb)) return GO_ON;
  struct head head = {bpf_ktime_get_ns(), size_bytes, direction, skb->gso_size, 0};

  if (size_bytes == 0) return GO_ON;
  if (size_bytes <= SMALL_BYTES) HAND_OVER(SMALL_BYTES);
  if (size_bytes <= JUMBO_BYTES) HAND_OVER(JUMBO_BYTES);
  if (size_bytes <= SUPER_BYTES) HAND_OVER(SUPER_BYTES);
  __sync_fetch_and_add(&counter->too_large, 1);
  return GO_ON;
}

SEC("tc") int packets_in(struct __sk_buff *skb) { return capture(skb, IN); }
SEC("tc") int packets_out(struct __sk_buff *skb) { return capture(skb, OUT); }

char licence[] SEC("license") = "GPL";
