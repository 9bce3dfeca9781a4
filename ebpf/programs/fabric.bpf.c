// SPDX-License-Identifier: Apache-2.0
// The switch of the testbed, with its faults. Attached to the ingress of every switch port (tc, direct action), it
// forwards by destination address and, for UDP and TCP, rolls dice on the way: drop, duplicate, mark (ECN), corrupt,
// hold back (reorder). It sits at the ingress of the switch and not at the egress of the host, so that a host cannot
// tell a drop from one far away: TCP notices a drop at its own egress at once, and would look better than it is.
//
// The random numbers of packet n are outputs n * DRAWS + kind of SplitMix64 (Steele, Lea, Flood: "Fast splittable
// pseudorandom number generators", OOPSLA 2014), so they depend on seed and n alone. testbed/topology/impairment.py
// computes the same in Python.
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// Python repeats those that it needs (fabric.py and impairment.py in testbed/topology); a test compares them.
#define HOSTS_MAX 64    // a port's number is plane * HOSTS_MAX + host,
#define PORTS_MAX 1024  // its interface has the index FIRST_PORT_IFINDEX + number
#define FIRST_PORT_IFINDEX 1000
#define HELD_MAX 128          // packets that a port can hold back; more than any depth
#define FRAME_MAX_BYTES 9216  // MTU 9000 and its Ethernet header, rounded up
#define FLAG_BLACKHOLE 1u     // drop everything that comes in at this port
#define FLAG_ORPHAN 2u        // detach packets from their sockets: a queue inside the network is not the sender's

#define MAC_PREFIX_0 0x02      // the first bytes of hardware addresses: locally administered (IEEE 802),
#define MAC_PREFIX_1 0x5e      // and this testbed's
#define FRAME_MIN_HELD_BYTES 80  // a shorter frame may end before the checksum field of the packet that carries it

enum draw { DRAW_DROP, DRAW_DUPLICATE, DRAW_MARK, DRAW_CORRUPT, DRAW_WHERE, DRAW_HOLD, DRAWS = 8 };

struct port_config {
  __u64 seed;
  // A packet is hit if the upper half of its draw is below the limit. 2^32 hits every packet.
  __u64 drop_below;
  __u64 duplicate_below;
  __u64 mark_below;
  __u64 corrupt_below;
  __u64 hold_below;
  __u32 hold_depth;
  __u32 hold_ring;  // which HELD_MAX entries of `held` belong to this port
  __u32 corrupt_skip_bytes;
  __u32 relay_ifindex;  // interface that packets to be delayed go to; 0: no delay
  __u32 flags;
  __u32 reserved;
};

// Counts packets as a receiver sees them: a super-packet (GSO) counts as its segments.
struct port_counters {
  __u64 packets;
  __u64 bytes;
  __u64 dropped;
  __u64 duplicated;
  __u64 marked;
  __u64 corrupted;
  __u64 held;
  __u64 released;
  __u64 unheld;
  __u64 blackholed;
  __u64 other;
  __u64 strangers;
  __u64 failed;
};

struct held_frame {
  __u32 length;
  __u32 reserved;
  __u8 frame[FRAME_MAX_BYTES];
};

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, PORTS_MAX);
  __type(key, __u32);
  __type(value, struct port_config);
} configs SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, PORTS_MAX);
  __type(key, __u32);
  __type(value, struct port_counters);
} counters SEC(".maps");

// Packets since the last change of configuration, which resets this number. The counters are never reset.
struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, PORTS_MAX);
  __type(key, __u32);
  __type(value, __u64);
} sequences SEC(".maps");

// Bytes of packets held back. The loader sets max_entries to HELD_MAX for each port. `hold_states` says which packet an
// entry belongs to (see below).
struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, 1);
  __type(key, __u32);
  __type(value, struct held_frame);
} held SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, 1);
  __type(key, __u32);
  __type(value, __u64);
} hold_states SEC(".maps");

static __always_inline __u64 draw(__u64 seed, __u64 n, enum draw kind) {
  __u64 z = seed + (n * DRAWS + kind + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

static __always_inline int hit(const struct port_config* config, __u64 n, enum draw kind, __u64 below) {
  return below && draw(config->seed, n, kind) >> 32 < below;
}

#define COUNT(field, amount) __sync_fetch_and_add(&count->field, (amount))

struct packet {
  __u32 payload_offset;
  __u8 protocol;  // IPPROTO_UDP or IPPROTO_TCP; 0: another protocol, which is left alone
};

static __always_inline struct packet classify(struct __sk_buff* skb, const struct ethhdr* ether) {
  struct packet found = {};
  __u32 transport_offset;
  __u8 protocol;
  if (ether->h_proto == bpf_htons(ETH_P_IPV6)) {
    struct ipv6hdr ip;
    if (bpf_skb_load_bytes(skb, sizeof *ether, &ip, sizeof ip)) return found;
    protocol = ip.nexthdr;
    transport_offset = sizeof *ether + sizeof ip;
  } else if (ether->h_proto == bpf_htons(ETH_P_IP)) {
    struct iphdr ip;
    if (bpf_skb_load_bytes(skb, sizeof *ether, &ip, sizeof ip)) return found;
    if (ip.frag_off & bpf_htons(0x3fff)) return found;  // RFC 791: more fragments, or an offset
    protocol = ip.protocol;
    transport_offset = sizeof *ether + ip.ihl * 4;
  } else {
    return found;
  }
  if (protocol == IPPROTO_UDP) {
    found.payload_offset = transport_offset + sizeof(struct udphdr);
  } else if (protocol == IPPROTO_TCP) {
    __u8 data_offset;
    if (bpf_skb_load_bytes(skb, transport_offset + 12, &data_offset, 1)) return found;  // RFC 9293 3.1
    found.payload_offset = transport_offset + (data_offset >> 4) * 4;
  } else {
    return found;
  }
  found.protocol = protocol;
  return found;
}

// Flips bits of one byte of the payload and leaves the checksum as it is. Virtual interfaces do not compute it, so the
// damage reaches the application.
static __always_inline int corrupt(struct __sk_buff* skb, const struct port_config* config, __u64 n,
                                   __u32 payload_offset) {
  __u32 first = payload_offset + config->corrupt_skip_bytes;
  if (skb->len <= first) return 0;
  __u64 where = draw(config->seed, n, DRAW_WHERE);
  __u32 offset = first + (__u32)(((where & 0xffffffff) * (skb->len - first)) >> 32);
  __u8 byte;
  if (bpf_skb_load_bytes(skb, offset, &byte, 1)) return -1;
  byte ^= 1 + (where >> 32) % 255;
  return bpf_skb_store_bytes(skb, offset, &byte, 1, BPF_F_INVALIDATE_HASH) ? -1 : 1;
}

// Packet n is held back until packet n + depth has passed. Several processors may work on one port, so an entry has a
// state that only a compare-and-swap changes: (n << 2 | phase); 0 if it was never used. If n + depth comes before n is
// written completely, it sets OVERTAKEN and n is sent at once, so n never stays behind.
enum phase { FREE, WRITING, FULL, OVERTAKEN };
#define STATE(n, phase) ((n) << 2 | (phase))
#define CAS(word, old, new) __sync_val_compare_and_swap((word), (old), (new))

static __always_inline __u32 entry_of(const struct port_config* config, __u64 n) {
  return config->hold_ring * HELD_MAX + (n & (HELD_MAX - 1));
}

// Returns whether the packet is now in the map; the original must then be dropped.
static __always_inline int hold(struct __sk_buff* skb, const struct port_config* config, __u64 n) {
  __u32 index = entry_of(config, n);
  __u64* state = bpf_map_lookup_elem(&hold_states, &index);
  struct held_frame* entry = bpf_map_lookup_elem(&held, &index);
  if (!state || !entry) return 0;
  __u32 length = skb->len;
  if (skb->gso_segs > 1 || length < FRAME_MIN_HELD_BYTES || length > FRAME_MAX_BYTES) return 0;
  __u64 before = *(volatile __u64*)state;
  if (before == STATE(n, OVERTAKEN) || (before & 3) == WRITING || (before & 3) == FULL) return 0;
  if (CAS(state, before, STATE(n, WRITING)) != before) return 0;
  barrier_var(length);
  if (length < FRAME_MIN_HELD_BYTES || length > FRAME_MAX_BYTES || bpf_skb_load_bytes(skb, 0, entry->frame, length)) {
    CAS(state, STATE(n, WRITING), STATE(n, FREE));
    return 0;
  }
  entry->length = length;
  return CAS(state, STATE(n, WRITING), STATE(n, FULL)) == STATE(n, WRITING);
}

// Takes packet n out if it is held. The entry belongs to the caller until it sets the state to FREE. 0 if n is not
// held.
static __always_inline struct held_frame* claim(const struct port_config* config, __u64 n, __u64** state_out) {
  __u32 index = entry_of(config, n);
  __u64* state = bpf_map_lookup_elem(&hold_states, &index);
  struct held_frame* entry = bpf_map_lookup_elem(&held, &index);
  if (!state || !entry) return 0;
  *state_out = state;
  __u64 before = *(volatile __u64*)state;
  // Unless the entry is full, mark n as overtaken, so that it will not be held any more. The entry changes at most
  // three times meanwhile: an older packet leaves it, n takes it, n is written completely.
  for (int attempt = 0; attempt < 4; ++attempt) {
    if ((before & 3) == FULL) break;
    __u64 seen = CAS(state, before, STATE(n, OVERTAKEN));
    if (seen == before) return 0;
    before = seen;
  }
  if (before != STATE(n, FULL)) return 0;
  return CAS(state, STATE(n, FULL), STATE(n, WRITING)) == STATE(n, FULL) ? entry : 0;
}

// Turns the current packet into the held one.
static __always_inline int become(struct __sk_buff* skb, struct held_frame* entry) {
  __u32 length = entry->length;
  if (length < FRAME_MIN_HELD_BYTES || length > FRAME_MAX_BYTES) return -1;
  if (bpf_skb_change_tail(skb, length, 0)) return -1;
  barrier_var(length);
  if (length < FRAME_MIN_HELD_BYTES || length > FRAME_MAX_BYTES) return -1;
  return bpf_skb_store_bytes(skb, 0, entry->frame, length, BPF_F_INVALIDATE_HASH) ? -1 : 0;
}

static __always_inline int forward(struct __sk_buff* skb, const struct port_config* config, __u32 target) {
  if (!(config->flags & FLAG_ORPHAN)) return bpf_redirect(target, 0);
  bpf_clone_redirect(skb, target, 0);  // a clone has no socket
  return TC_ACT_STOLEN;
}

SEC("tc")
int fabric(struct __sk_buff* skb) {
  __u32 port = skb->ifindex - FIRST_PORT_IFINDEX;
  struct port_config* config = bpf_map_lookup_elem(&configs, &port);
  struct port_counters* count = bpf_map_lookup_elem(&counters, &port);
  __u64* sequence = bpf_map_lookup_elem(&sequences, &port);
  if (!config || !count || !sequence) return TC_ACT_SHOT;

  struct ethhdr ether;
  if (bpf_skb_load_bytes(skb, 0, &ether, sizeof ether)) return TC_ACT_SHOT;
  // 02:5e:00:00:<plane>:<host>. All neighbours are known, so only strangers broadcast.
  if (ether.h_dest[0] != MAC_PREFIX_0 || ether.h_dest[1] != MAC_PREFIX_1 || ether.h_dest[4] != port / HOSTS_MAX ||
      ether.h_dest[5] >= HOSTS_MAX) {
    COUNT(strangers, 1);
    return TC_ACT_SHOT;
  }
  __u32 out_port = port / HOSTS_MAX * HOSTS_MAX + ether.h_dest[5];
  __u32 target = config->relay_ifindex ? config->relay_ifindex : FIRST_PORT_IFINDEX + out_port;
  __u32 segments = skb->gso_segs ? skb->gso_segs : 1;
  struct packet packet = classify(skb, &ether);
  if (!packet.protocol) {
    COUNT(other, segments);
    if (config->flags & FLAG_BLACKHOLE) return TC_ACT_SHOT;
    return forward(skb, config, target);
  }
  COUNT(packets, segments);
  COUNT(bytes, skb->len + (segments - 1) * packet.payload_offset);
  if (config->flags & FLAG_BLACKHOLE) {
    COUNT(blackholed, segments);
    return TC_ACT_SHOT;
  }

  __u64 n = __sync_fetch_and_add(sequence, 1);
  int gone = 0;
  if (hit(config, n, DRAW_DROP, config->drop_below)) {
    COUNT(dropped, segments);
    gone = 1;
  } else {
    // The copy goes first and undamaged, so that each counter counts packets that the receiver sees.
    if (hit(config, n, DRAW_DUPLICATE, config->duplicate_below)) {
      if (bpf_clone_redirect(skb, target, 0))
        COUNT(failed, segments);
      else
        COUNT(duplicated, segments);
    }
    if (hit(config, n, DRAW_HOLD, config->hold_below)) {
      gone = hold(skb, config, n);
      if (gone)
        COUNT(held, 1);
      else
        COUNT(unheld, segments);
    }
    // A packet held back may never be sent, so it is not counted as marked or corrupted too.
    if (!gone && hit(config, n, DRAW_MARK, config->mark_below) && bpf_skb_ecn_set_ce(skb)) COUNT(marked, segments);
    if (!gone && hit(config, n, DRAW_CORRUPT, config->corrupt_below)) {
      if (packet.protocol == IPPROTO_TCP) {
        // TCP's checksum would reveal the damage, but virtual interfaces do not compute it: drop the packet here.
        COUNT(corrupted, segments);
        gone = 1;
      } else {
        int done = corrupt(skb, config, n, packet.payload_offset);
        if (done > 0) COUNT(corrupted, 1);
        if (done < 0) COUNT(failed, 1);
      }
    }
  }

  __u64 due = n - config->hold_depth;
  if (n >= config->hold_depth && hit(config, due, DRAW_HOLD, config->hold_below)) {
    __u64* state = 0;
    struct held_frame* entry = claim(config, due, &state);
    if (entry && state) {
      // A clone of this packet goes on. The packet itself then becomes the held one, right behind it.
      if (!gone && bpf_clone_redirect(skb, target, 0)) COUNT(failed, segments);
      int failed = become(skb, entry);
      CAS(state, STATE(due, WRITING), STATE(due, FREE));
      if (failed) {
        COUNT(failed, 1);
        return TC_ACT_SHOT;
      }
      COUNT(released, 1);
      return forward(skb, config, target);
    }
  }
  return gone ? TC_ACT_SHOT : forward(skb, config, target);
}

char licence[] SEC("license") = "Apache-2.0";
