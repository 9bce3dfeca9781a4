// SPDX-License-Identifier: Apache-2.0
// The aggregator in the kernel (docs/reference/aggregation.md): `aggregate` stores leaves as they arrive, makes the sum
// of a block, and answers leaves that come again. `answer`, behind it at the same interface, sends the sum to all
// ranks, because an XDP program can send a packet to one place only. All other packets for the port go on to the
// daemon, which works in the same memory: what makes and ends jobs, leaves that are refused, and ranks that `answer`
// cannot reach.
#include "aggregation_slots.h"
#include "checksum.h"
#include "feed.h"
#include "float_sum.h"

// BPF_MAP_TYPE_ARENA: the headers of a distribution may be older than its kernel.
#define MAP_TYPE_ARENA 33
#define ARENA __attribute__((address_space(1)))
#define AT(type, offset) ((type ARENA*)(__u64)(offset))
#define TCX_NEXT (-1)
#define TCX_DROP 2
#define OWN_ADDRESSES_MAX 8
// While another processor stores a leaf, or sums. Then the leaf is dropped, and comes again.
#define LOCK_TRIES 256
// Some drivers take packets that go back and lose them, as that of veth where the other end has no NAPI. So of this
// many repeats one is answered by the daemon.
#define REPEATS_MAX 4
// Every offset stays below this, so the verifier knows that adding a width does not overflow.
#define OFFSET_MAX 0x3fff
#define UDP_BYTES 8
#define IPV4_BYTES 20
#define IPV6_BYTES 40

struct {
  __uint(type, MAP_TYPE_ARENA);
  __uint(map_flags, BPF_F_MMAPABLE);
  __uint(max_entries, 1);  // the loader sets it
} memory SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
  __uint(max_entries, 1);
  __type(key, __u32);
  __type(value, struct aggregation_counters);
} counters SEC(".maps");

const volatile __u32 port = 0;

// Else the driver does not run the program, packets may lack their UDP checksums, and the daemon answers.
__u32 is_native;

// Addresses that packets must have. The process writes them before it attaches the programs.
struct aggregation_own {
  __u8 hardware[ETH_ALEN];
  __u16 count;
  struct {
    __u32 family;
    __be32 address[4];
  } addresses[OWN_ADDRESSES_MAX];
};
struct aggregation_own own;

// Leaves a loop that runs too long (may_goto, Linux 6.9).
#define STOP_ENDLESS(label) asm volatile goto("may_goto %l[" #label "]" :: ::label)

// Declares `place`, the address of `size` bytes of the packet from the offset `at` on, or jumps to `outside`. The
// barrier keeps the compiler from deriving this check from another one, which the verifier does not follow.
#define INSIDE(place, at, size)        \
  asm volatile("" : "+r"(at));         \
  if ((at) > OFFSET_MAX) goto outside; \
  __u8* place = data + (at);           \
  if ((void*)(place + (size)) > data_end) goto outside

#define WORD(place, n) (*(__u64*)((place) + 8 * (n)))

// A datagram of this size, and its answers, of the same size.
static __always_inline void count(enum aggregation_verdict verdict, __u32 bytes, __u32 answers, __u32 unanswered) {
  const __u32 zero = 0;
  struct aggregation_counters* found = bpf_map_lookup_elem(&counters, &zero);
  if (!found) return;
  if (verdict < AGGREGATION_VERDICTS) ((__u64*)found)[verdict]++;
  found->answers += answers;
  found->unanswered += unanswered;
  found->received_bytes += bytes;
  found->sent_bytes += (__u64)bytes * answers;
}

static __always_inline int is_own_address(__u32 family, const __be32* address) {
  for (__u32 n = 0; n < OWN_ADDRESSES_MAX; n++) {
    if (n >= own.count) return 0;
    if (own.addresses[n].family != family || own.addresses[n].address[0] != address[0]) continue;
    if (family == 4 || (own.addresses[n].address[1] == address[1] && own.addresses[n].address[2] == address[2] &&
                        own.addresses[n].address[3] == address[3]))
      return 1;
  }
  return 0;
}

// From the offset of the payload alone: 14 bytes of Ethernet, 4 for each VLAN tag, IP and UDP.
static __always_inline __u32 family_of(__u32 at) { return at >= ETH_HLEN + IPV6_BYTES + UDP_BYTES ? 6 : 4; }

// A datagram for this interface and port. Its size << 8 | the offset of its payload, or 0.
static __always_inline __u64 find(void* data, void* data_end) {
  const struct feed_datagram found = feed_find(data, data_end, 0);
  if (!found.at || found.port != port) return 0;
  const __u8* hardware = data;
  if (*(__u32*)hardware != *(__u32*)own.hardware || *(__u16*)(hardware + 4) != *(__u16*)(own.hardware + 4)) return 0;
  __u64 at = found.at - UDP_BYTES;
  __be32 address[4] = {};
  if (family_of(found.at) == 6) {
    at -= 16;
    INSIDE(place, at, 16);
    __builtin_memcpy(address, place, 16);
  } else {
    at -= 4;
    INSIDE(place, at, 4);
    __builtin_memcpy(address, place, 4);
  }
  if (!is_own_address(family_of(found.at), address)) return 0;
  return (__u64)found.bytes << 8 | found.at;
outside:
  return 0;
}

// The verifier walks a global function once by itself, and not once for each combination of headers.
__attribute__((noinline)) __u64 find_frame(struct xdp_md* context) {
  return find((void*)(long)context->data, (void*)(long)context->data_end);
}

__attribute__((noinline)) __u64 find_buffer(struct __sk_buff* buffer) {
  return find((void*)(long)buffer->data, (void*)(long)buffer->data_end);
}

__attribute__((noinline)) __u64 checksum(struct xdp_md* context, __u64 at, __u32 stripes) {
  void *data = (void*)(long)context->data, *data_end = (void*)(long)context->data_end;
  __u64 a = CHECKSUM_SUM_0, b = CHECKSUM_SUM_1, c = CHECKSUM_SUM_2, d = CHECKSUM_SUM_3;
  for (__u32 n = 0; n <= stripes; n++) {
    STOP_ENDLESS(outside);
    INSIDE(stripe, at, AGGREGATION_STRIPE_BYTES);
    a = checksum_word(a, WORD(stripe, 0));
    b = checksum_word(b, WORD(stripe, 1));
    c = checksum_word(c, WORD(stripe, 2));
    d = checksum_word(d, WORD(stripe, 3));
    at += AGGREGATION_STRIPE_BYTES + (n ? 0 : sizeof(__u64));
  }
  return checksum_end(checksum_join(a, b, c, d, (1ull + stripes) * AGGREGATION_STRIPE_BYTES));
outside:
  return 0;
}

// Sums of cells, word by word. All work in place: when a block is complete, nobody needs its leaves. Global functions,
// so that the verifier walks each loop once.
#define EACH_WORD(words) for (__u32 n = 0; n < (words); n++, to += 4, left += 4, right += 4)

__attribute__((noinline)) int sum_floats(__u64 to, __u64 left, __u64 right, __u32 words) {
  EACH_WORD(words) {
    STOP_ENDLESS(out);
    *AT(__u32, to) = float_sum(*AT(__u32, left), *AT(__u32, right));
  }
out:
  return 0;
}

__attribute__((noinline)) int sum_integers(__u64 to, __u64 left, __u64 right, __u32 words) {
  EACH_WORD(words) {
    STOP_ENDLESS(out);
    *AT(__u32, to) = *AT(__u32, left) + *AT(__u32, right);
  }
out:
  return 0;
}

// A node of bfloat16 has two leaves or more, and so two cells: float32 of the elements with even numbers, and of the
// others. A leaf is as it came. `is_leaf`: so is the left node, whose cells are written.
__attribute__((noinline)) int sum_with_leaf(__u64 left, __u64 right, __u32 words, __u32 is_leaf) {
  __u64 to = left;
  EACH_WORD(words) {
    STOP_ENDLESS(out);
    const __u32 first = *AT(__u32, left), leaf = *AT(__u32, right);
    const __u32 even = is_leaf ? first << 16 : first;
    const __u32 odd = is_leaf ? first & 0xffff0000u : *AT(__u32, left + AGGREGATION_CELL_BYTES);
    *AT(__u32, to) = float_sum(even, leaf << 16);
    *AT(__u32, to + AGGREGATION_CELL_BYTES) = float_sum(odd, leaf & 0xffff0000u);
  }
out:
  return 0;
}

__attribute__((noinline)) int round_bfloats(__u64 to, __u64 left, __u32 words) {
  __u64 right = left + AGGREGATION_CELL_BYTES;
  EACH_WORD(words) {
    STOP_ENDLESS(out);
    *AT(__u32, to) = bfloat_of(*AT(__u32, left)) | (__u32)bfloat_of(*AT(__u32, right)) << 16;
  }
out:
  return 0;
}

#define TREE_LEVELS 6  // above the leaves, of which there are 64

// 0, which the verifier does not know. So one round of a loop that begins there is like the next.
__u32 nothing;

// Makes the sum of a block whose leaves are all there, over the canonical tree. The caller has the slot.
__attribute__((noinline)) int sum_block(__u64 slot_at, __u32 leaves, __u32 stripes, __u32 arithmetic) {
  const __u64 result = slot_at + sizeof(struct aggregation_slot), first = result + AGGREGATION_CELL_BYTES;
  const __u32 words = stripes * (AGGREGATION_STRIPE_BYTES / 4);
  for (__u32 level = 0; level < TREE_LEVELS; level++) {
    const __u32 half = 1u << level;  // the leaves of a left node
    if (half >= leaves) break;
    for (__u32 leaf = nothing; leaf + half < leaves; leaf += 2 * half) {
      STOP_ENDLESS(out);
      const __u64 left = first + (__u64)leaf * AGGREGATION_CELL_BYTES;
      const __u64 right = left + (__u64)half * AGGREGATION_CELL_BYTES;
      const __u64 to = 2 * half < leaves ? left : result;  // the root goes to its place at once
      if (arithmetic == AGGREGATION_SUM_F32) {
        sum_floats(to, left, right, words);
      } else if (arithmetic == AGGREGATION_SUM_I32) {
        sum_integers(to, left, right, words);
      } else if (leaf + half + 1 == leaves || half == 1) {
        sum_with_leaf(left, right, words, half == 1);
      } else {
        sum_floats(left, left, right, words);
        sum_floats(left + AGGREGATION_CELL_BYTES, left + AGGREGATION_CELL_BYTES, right + AGGREGATION_CELL_BYTES, words);
      }
    }
  }
  if (arithmetic == AGGREGATION_SUM_BF16) round_bfloats(result, first, words);
out:
  return 0;
}

static __always_inline int lock(struct aggregation_slot ARENA* slot) {
  for (__u32 n = 0; n < LOCK_TRIES; n++)
    if (aggregation_try_lock(slot)) return 1;
  return 0;
}

static __always_inline __u32 halves(__u64 word) {
  return (word & 0xffff) + (word >> 16 & 0xffff) + (word >> 32 & 0xffff) + (word >> 48);
}

static __always_inline __u16 folded(__u64 sum) {
  sum = (sum & 0xffffffff) + (sum >> 32);
  sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
  sum = (sum & 0xffff) + (sum >> 16);
  return (sum & 0xffff) + (sum >> 16);
}

// Writes the sum of a block over the leaf in the packet at `payload`. Returns the ones' complement sum of the payload;
// 0 if the packet is too short, which `checksum` has excluded.
static __always_inline __u64 write_result(void* data, void* data_end, __u64 at, __u64 cell_at, __u32 stripes) {
  __u64 a = CHECKSUM_SUM_0, b = CHECKSUM_SUM_1, c = CHECKSUM_SUM_2, d = CHECKSUM_SUM_3, sum = 0;
  __u64 header_at = at;
  {
    INSIDE(header, at, sizeof(struct aggregation_header));
    header[3] = AGGREGATION_RESULT;
    a = checksum_word(a, WORD(header, 0));
    b = checksum_word(b, WORD(header, 1));
    c = checksum_word(c, WORD(header, 2));
    d = checksum_word(d, WORD(header, 3));
    sum = (__u64)halves(WORD(header, 0)) + halves(WORD(header, 1)) + halves(WORD(header, 2)) + halves(WORD(header, 3));
  }
  at += sizeof(struct aggregation_header);
  cell_at += sizeof(struct aggregation_slot);
  for (__u32 n = 0; n < stripes; n++) {
    STOP_ENDLESS(outside);
    INSIDE(stripe, at, AGGREGATION_STRIPE_BYTES);
    const __u64 w = *AT(__u64, cell_at), x = *AT(__u64, cell_at + 8), y = *AT(__u64, cell_at + 16),
                z = *AT(__u64, cell_at + 24);
    WORD(stripe, 0) = w;
    WORD(stripe, 1) = x;
    WORD(stripe, 2) = y;
    WORD(stripe, 3) = z;
    a = checksum_word(a, w);
    b = checksum_word(b, x);
    c = checksum_word(c, y);
    d = checksum_word(d, z);
    sum += (__u64)halves(w) + halves(x) + halves(y) + halves(z);
    at += AGGREGATION_STRIPE_BYTES;
    cell_at += AGGREGATION_STRIPE_BYTES;
  }
  const __u64 found =
      bpf_cpu_to_be64(checksum_end(checksum_join(a, b, c, d, (1ull + stripes) * AGGREGATION_STRIPE_BYTES)));
  header_at += AGGREGATION_STRIPE_BYTES;
  INSIDE(place, header_at, 8);
  WORD(place, 0) = found;
  return sum + halves(found);
outside:
  return 0;
}

// Sends the packet back: exchanges its ends, and writes the UDP checksum, if IPv6 wants one.
static __always_inline int turn(void* data, void* data_end, __u64 at, __u32 bytes, __u64 sum) {
  __u8 hardware[ETH_ALEN];
  __u64 zero = 0;
  INSIDE(ether, zero, 2 * ETH_ALEN);
  __builtin_memcpy(hardware, ether, ETH_ALEN);
  __builtin_memcpy(ether, ether + ETH_ALEN, ETH_ALEN);
  __builtin_memcpy(ether + ETH_ALEN, hardware, ETH_ALEN);
  __u64 udp_at = at - UDP_BYTES;
  INSIDE(udp, udp_at, UDP_BYTES);
  const __u32 ports = *(__u32*)udp;
  *(__u32*)udp = ports << 16 | ports >> 16;
  if (family_of(at) == 6) {
    __u64 ip_at = at - UDP_BYTES - 32;  // the addresses
    INSIDE(ip, ip_at, 32);
    const __u64 a = WORD(ip, 0), b = WORD(ip, 1), c = WORD(ip, 2), d = WORD(ip, 3);
    WORD(ip, 0) = c;
    WORD(ip, 1) = d;
    WORD(ip, 2) = a;
    WORD(ip, 3) = b;
    const __u32 length = bpf_htons(bytes + UDP_BYTES);
    sum += (__u64)halves(a) + halves(b) + halves(c) + halves(d) + halves(ports) + 2 * length + bpf_htons(IPPROTO_UDP);
    const __u16 found = ~folded(sum);
    *(__u16*)(udp + 6) = found ? found : 0xffff;
  } else {
    __u64 ip_at = at - UDP_BYTES - 8;
    INSIDE(ip, ip_at, 8);
    WORD(ip, 0) = WORD(ip, 0) << 32 | WORD(ip, 0) >> 32;
    *(__u16*)(udp + 6) = 0;
  }
  return 1;
outside:
  return 0;
}

// Where the packet came from, and where it went to.
static __always_inline int learn(struct xdp_md* context, __u64 at, struct aggregation_endpoint ARENA* rank) {
  void *data = (void*)(long)context->data, *data_end = (void*)(long)context->data_end;
  __u64 zero = 0;
  INSIDE(ether, zero, ETH_HLEN + 2 * sizeof(struct feed_vlan_tag));
  const __u32 ip_bytes = family_of(at) == 6 ? IPV6_BYTES : IPV4_BYTES;
  const __u32 tags = (at - ETH_HLEN - UDP_BYTES - ip_bytes) / sizeof(struct feed_vlan_tag);
  __u64 udp_at = at - UDP_BYTES;
  INSIDE(udp, udp_at, UDP_BYTES);
  if (family_of(at) == 6) {
    __u64 ip_at = at - UDP_BYTES - 32;
    INSIDE(ip, ip_at, 32);
    for (__u32 n = 0; n < 4; n++) {
      rank->address[n] = *(__u32*)(ip + 4 * n);
      rank->own_address[n] = *(__u32*)(ip + 16 + 4 * n);
    }
  } else {
    __u64 ip_at = at - UDP_BYTES - 8;
    INSIDE(ip, ip_at, 8);
    for (__u32 n = 0; n < 4; n++) {
      rank->address[n] = n ? 0 : *(__u32*)ip;
      rank->own_address[n] = n ? 0 : *(__u32*)(ip + 4);
    }
  }
  for (__u32 n = 0; n < ETH_ALEN; n++) {
    rank->own_hardware[n] = ether[n];
    rank->hardware[n] = ether[ETH_ALEN + n];
  }
  // A tag's type is where the type of a plain frame is, its control behind that.
  rank->tags[0] = tags > 0 ? *(__u32*)(ether + 12) : 0;
  rank->tags[1] = tags > 1 ? *(__u32*)(ether + 16) : 0;
  rank->tag_count = tags;
  rank->port = *(__u16*)udp;
  rank->own_port = *(__u16*)(udp + 2);
  rank->interface = context->ingress_ifindex;
  rank->family = family_of(at);
  return 1;
outside:
  return 0;
}

// The bytes of a leaf into its cell.
__attribute__((noinline)) int store(struct xdp_md* context, __u64 at, __u64 cell_at, __u32 stripes) {
  void *data = (void*)(long)context->data, *data_end = (void*)(long)context->data_end;
  for (__u32 n = 0; n < stripes; n++) {
    STOP_ENDLESS(outside);
    INSIDE(stripe, at, AGGREGATION_STRIPE_BYTES);
    *AT(__u64, cell_at) = WORD(stripe, 0);
    *AT(__u64, cell_at + 8) = WORD(stripe, 1);
    *AT(__u64, cell_at + 16) = WORD(stripe, 2);
    *AT(__u64, cell_at + 24) = WORD(stripe, 3);
    at += AGGREGATION_STRIPE_BYTES;
    cell_at += AGGREGATION_STRIPE_BYTES;
  }
  return 1;
outside:
  return 0;
}

__attribute__((noinline)) int send_back(struct xdp_md* context, __u64 at, __u64 slot_at, __u32 stripes) {
  void *data = (void*)(long)context->data, *data_end = (void*)(long)context->data_end;
  const __u32 bytes = sizeof(struct aggregation_header) + stripes * AGGREGATION_STRIPE_BYTES;
  const __u64 sum = write_result(data, data_end, at, slot_at, stripes);
  return turn(data, data_end, at, bytes, sum);
}

// The slot of a leaf: its offset in the memory; 0: the job is not known.
static __always_inline __u64 slot_of(const struct aggregation_header* header) {
  const __u32 number = bpf_ntohl(header->job);
  struct aggregation_job ARENA* job =
      AT(struct aggregation_job, (__u64)(number & (AGGREGATION_JOBS_MAX - 1)) * sizeof(struct aggregation_job));
  if (!number || AGGREGATION_LOAD(job->number) != number || job->key != bpf_be64_to_cpu(header->key)) return 0;
  const __u64 cell = aggregation_cell_of(job->first_cell, job->slots, job->leaves, bpf_be64_to_cpu(header->block));
  return AGGREGATION_CELLS_AT + cell * AGGREGATION_CELL_BYTES;
}

static __always_inline int drop(enum aggregation_verdict verdict, __u32 bytes) {
  count(verdict, bytes, 0, 0);
  return XDP_DROP;
}

SEC("xdp")
int aggregate(struct xdp_md* context) {
  asm volatile("" ::"r"(&memory));  // tells the verifier which arena this program has
  const __u64 found = find_frame(context);
  __u64 at = found & 0xff;
  const __u32 bytes = found >> 8 & 0xffff;
  void *data = (void*)(long)context->data, *data_end = (void*)(long)context->data_end;
  if (!at) return XDP_PASS;
  if (bytes < sizeof(struct aggregation_header)) return drop(AGGREGATION_VERDICT_TRUNCATED, bytes);
  INSIDE(begin, at, sizeof(struct aggregation_header));
  struct aggregation_header* header = (void*)begin;
  if (header->magic != bpf_htons(AGGREGATION_MAGIC)) return drop(AGGREGATION_VERDICT_FOREIGN, bytes);
  if (header->version != AGGREGATION_VERSION) return drop(AGGREGATION_VERDICT_WRONG_VERSION, bytes);
  if (header->kind == AGGREGATION_JOIN || header->kind == AGGREGATION_LEAVE) return XDP_PASS;
  const __u32 stripes = header->stripes, arithmetic = header->arithmetic, leaf = bpf_ntohs(header->leaf);
  const __u32 stated = sizeof *header + stripes * AGGREGATION_STRIPE_BYTES;
  if (bytes < stated) return drop(AGGREGATION_VERDICT_TRUNCATED, bytes);
  if (bytes > stated || stripes > AGGREGATION_STRIPES_MAX || header->kind > AGGREGATION_LEAVE ||
      arithmetic > AGGREGATION_SUM_BF16)
    return drop(AGGREGATION_VERDICT_MALFORMED, bytes);
  if (at + stated > (__u64)(data_end - data)) return drop(AGGREGATION_VERDICT_TRUNCATED, bytes);
  if (checksum(context, at, stripes) != bpf_be64_to_cpu(header->checksum))
    return drop(AGGREGATION_VERDICT_CORRUPT, bytes);
  if (header->kind != AGGREGATION_LEAF) return drop(AGGREGATION_VERDICT_UNEXPECTED, bytes);
  if (!stripes) return drop(AGGREGATION_VERDICT_MALFORMED, bytes);
  const __u32 number = bpf_ntohl(header->job), mark = bpf_ntohl(header->mark);
  const __u64 block = bpf_be64_to_cpu(header->block), slot_at = slot_of(header);
  if (!slot_at) return XDP_PASS;
  struct aggregation_job ARENA* job =
      AT(struct aggregation_job, (__u64)(number & (AGGREGATION_JOBS_MAX - 1)) * sizeof(struct aggregation_job));
  const __u32 leaves = job->leaves;
  if (leaf >= leaves) return drop(AGGREGATION_VERDICT_MALFORMED, bytes);
  if (!job->is_touched) job->is_touched = 1;
  learn(context, at, &job->ranks[leaf]);
  struct aggregation_slot ARENA* slot = AT(struct aggregation_slot, slot_at);
  if (!lock(slot)) return drop(AGGREGATION_VERDICT_BUSY, bytes);
  int action = XDP_DROP;
  enum aggregation_verdict verdict = AGGREGATION_VERDICTS;
  // The job may have gone, and the cells may belong to another one now. Or its number was read here before the rest of
  // it, which the lock has put in order.
  if (slot_of(header) != slot_at || job->leaves != leaves) {
    action = XDP_PASS;
  } else {
    verdict = aggregation_judge(slot, block, mark, arithmetic, stripes, leaf);
    if (verdict == AGGREGATION_VERDICT_STORED) {
      store(context, at + sizeof *header, slot_at + (leaf + 1ull) * AGGREGATION_CELL_BYTES + sizeof *slot, stripes);
      verdict = aggregation_note(slot, leaf, leaves, verdict);
      if (verdict == AGGREGATION_VERDICT_COMPLETED) {
        sum_block(slot_at, leaves, stripes, arithmetic);
        slot->state = AGGREGATION_SUMMED;
        action = XDP_PASS;
      }
    } else if (verdict == AGGREGATION_VERDICT_REPEATED_LATE && is_native && ++slot->repeats % REPEATS_MAX) {
      action = send_back(context, at, slot_at, stripes) ? XDP_TX : XDP_DROP;
    } else if (verdict != AGGREGATION_VERDICT_STALE) {
      action = XDP_PASS;
    }
  }
  aggregation_unlock(slot);
  // What goes on is counted there.
  if (action != XDP_PASS) count(verdict, bytes, action == XDP_TX, 0);
  return action;
outside:
  return drop(AGGREGATION_VERDICT_TRUNCATED, bytes);
}

// What all copies of an answer have in common.
struct copies {
  __u64 sum;           // of the payload
  __u32 length;        // of UDP, as in its header
  __u32 ip_sum;        // of the header of IPv4, but its checksum and addresses
  __u32 has_checksum;  // IPv4 needs none
  __u32 is_partial;    // the device computes the checksum, from the sum of the pseudo header
};

// The daemon, too, learns where ranks are, but sees no frames.
static __always_inline int has_hardware(const struct aggregation_endpoint ARENA* rank) {
  __u32 bits = 0;
  for (__u32 n = 0; n < ETH_ALEN; n++) bits |= rank->hardware[n];
  return bits != 0;
}

// Whether every rank is reached by a packet like this one, but for addresses.
static __always_inline int are_alike(struct aggregation_job ARENA* job, __u32 leaves, __u32 leaf) {
  struct aggregation_endpoint ARENA* model = &job->ranks[leaf & (AGGREGATION_LEAVES_MAX - 1)];
  for (__u32 n = 0; n < leaves; n++) {
    STOP_ENDLESS(out);
    struct aggregation_endpoint ARENA* rank = &job->ranks[n & (AGGREGATION_LEAVES_MAX - 1)];
    if (rank->family != model->family || rank->tag_count != model->tag_count || rank->tags[0] != model->tags[0] ||
        rank->tags[1] != model->tags[1] || !has_hardware(rank))
      return 0;
  }
  return 1;
out:
  return 0;
}

// Sends a copy of the packet to a rank. Returns whether the interface has taken it.
static __always_inline int send_copy(struct __sk_buff* buffer, __u32 at, const struct copies* all,
                                     struct aggregation_endpoint ARENA* rank) {
  __u8 hardware[2 * ETH_ALEN];
  __u32 ends[8], ports = rank->port << 16 | rank->own_port;
  __u64 pseudo = (__u64)all->length + bpf_htons(IPPROTO_UDP);
  for (__u32 n = 0; n < ETH_ALEN; n++) {
    hardware[n] = rank->hardware[n];
    hardware[ETH_ALEN + n] = rank->own_hardware[n];
  }
  for (__u32 n = 0; n < 4; n++) {
    ends[n] = rank->own_address[n];
    ends[4 + n] = rank->address[n];
    pseudo += (__u64)halves(ends[n]) + halves(ends[4 + n]);
  }
  bpf_skb_store_bytes(buffer, 0, hardware, sizeof hardware, 0);
  if (rank->family == 6) {
    bpf_skb_store_bytes(buffer, at - UDP_BYTES - 32, ends, sizeof ends, 0);
  } else {
    __u32 both[2] = {ends[0], ends[4]};
    __u16 found = ~folded(all->ip_sum + (__u64)halves(both[0]) + halves(both[1]));
    bpf_skb_store_bytes(buffer, at - UDP_BYTES - 8, both, sizeof both, 0);
    bpf_skb_store_bytes(buffer, at - UDP_BYTES - 10, &found, sizeof found, 0);
  }
  bpf_skb_store_bytes(buffer, at - UDP_BYTES, &ports, sizeof ports, 0);
  __u16 udp = all->is_partial ? folded(pseudo) : 0;
  if (all->has_checksum && !all->is_partial) {
    udp = ~folded(pseudo + halves(ports) + all->length + all->sum);
    udp = udp ? udp : 0xffff;
  }
  bpf_skb_store_bytes(buffer, at - 2, &udp, sizeof udp, 0);
  return !bpf_clone_redirect(buffer, rank->interface, 0);
}

SEC("tc")
int answer(struct __sk_buff* buffer) {
  asm volatile("" ::"r"(&memory));
  const __u64 found = find_buffer(buffer);
  __u64 at = found & 0xff;
  const __u32 bytes = found >> 8 & 0xffff;
  // The kernel may have joined several packets, if somebody has asked for that.
  if (!at || buffer->gso_size || bytes <= sizeof(struct aggregation_header)) return TCX_NEXT;
  if (bpf_skb_pull_data(buffer, buffer->len)) return TCX_NEXT;
  void *data = (void*)(long)buffer->data, *data_end = (void*)(long)buffer->data_end;
  INSIDE(begin, at, sizeof(struct aggregation_header));
  struct aggregation_header* header = (void*)begin;
  if (header->magic != bpf_htons(AGGREGATION_MAGIC) || header->kind != AGGREGATION_LEAF) return TCX_NEXT;
  const __u32 stripes = header->stripes, leaf = bpf_ntohs(header->leaf), number = bpf_ntohl(header->job);
  const __u64 block = bpf_be64_to_cpu(header->block), slot_at = slot_of(header);
  if (!slot_at || bytes != sizeof *header + stripes * AGGREGATION_STRIPE_BYTES) return TCX_NEXT;
  struct aggregation_job ARENA* job =
      AT(struct aggregation_job, (__u64)(number & (AGGREGATION_JOBS_MAX - 1)) * sizeof(struct aggregation_job));
  const __u32 leaves = job->leaves;
  if (leaf >= leaves || !are_alike(job, leaves, leaf)) return TCX_NEXT;

  struct copies all = {};
  __u64 udp_at = at - UDP_BYTES;
  INSIDE(udp, udp_at, UDP_BYTES);
  const __u16 old = *(__u16*)(udp + 6);
  all.length = *(__u16*)(udp + 4);
  __u64 pseudo = (__u64)all.length + bpf_htons(IPPROTO_UDP);
  if (family_of(at) == 6) {
    __u64 ip_at = at - UDP_BYTES - 32;
    INSIDE(ip, ip_at, 32);
    pseudo += (__u64)halves(WORD(ip, 0)) + halves(WORD(ip, 1)) + halves(WORD(ip, 2)) + halves(WORD(ip, 3));
  } else {
    __u64 ip_at = at - UDP_BYTES - IPV4_BYTES;
    INSIDE(ip, ip_at, IPV4_BYTES);
    all.ip_sum = halves(WORD(ip, 0)) + *(__u16*)(ip + 8);
    pseudo += (__u64)halves(*(__u32*)(ip + 12)) + halves(*(__u32*)(ip + 16));
  }
  all.has_checksum = family_of(at) == 6;
  all.is_partial = old && old == folded(pseudo);

  struct aggregation_slot ARENA* slot = AT(struct aggregation_slot, slot_at);
  if (!lock(slot)) return TCX_NEXT;
  const int is_ours = slot_of(header) == slot_at && job->leaves == leaves && slot->leaves && slot->block == block &&
                      slot->state == AGGREGATION_SUMMED && slot->stripes == stripes;
  if (is_ours) {
    slot->state = AGGREGATION_ANSWERED;
    all.sum = write_result(data, data_end, at, slot_at, stripes);
  }
  aggregation_unlock(slot);
  if (!is_ours) return TCX_NEXT;

  __u32 sent = 0;
  for (__u32 n = 0; n < leaves; n++) {
    STOP_ENDLESS(done);
    sent += send_copy(buffer, at, &all, &job->ranks[n & (AGGREGATION_LEAVES_MAX - 1)]);
  }
done:
  count(AGGREGATION_VERDICT_COMPLETED, bytes, sent, leaves - sent);
  return TCX_DROP;
outside:
  return TCX_NEXT;
}

char licence[] SEC("license") = "Dual BSD/GPL";
