// SPDX-License-Identifier: Apache-2.0
// Sends prepared frames again and again, for batch after batch: the load of `sennit bench offload --end-to-end`. Each
// run with BPF_F_TEST_XDP_LIVE_FRAMES sends one frame to an interface, without a socket.
#include "feed.h"

// The size of every frame. The compiler's command line may set another one.
#ifndef FRAME_BYTES
#define FRAME_BYTES 256
#endif

#define PORT_AT (sizeof(struct ethhdr) + sizeof(struct ipv6hdr) + 2)
#define CHECKSUM_AT (sizeof(struct ethhdr) + sizeof(struct ipv6hdr) + 6)

struct frame {
  __u64 words[(FRAME_BYTES + 7) / 8];
};

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, 1);  // the loader sets it
  __type(key, __u32);
  __type(value, struct frame);
} frames SEC(".maps");

struct frames_state {
  __u32 next;  // the next frame of the batch
  __u32 interface_index;
  __u32 udp_port;
};

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(map_flags, BPF_F_MMAPABLE);
  __uint(max_entries, 1);
  __type(key, __u32);
  __type(value, struct frames_state);
} state SEC(".maps");

// Frames are prepared for port 0. Their UDP checksum is updated for the real one as in RFC 1624.
SEC("xdp")
int send_frame(struct xdp_md* context) {
  void *data = (void*)(long)context->data, *data_end = (void*)(long)context->data_end;
  __u32 zero = 0;
  struct frames_state* at = bpf_map_lookup_elem(&state, &zero);
  if (!at || data + FRAME_BYTES > data_end) return XDP_ABORTED;
  __u32 number = at->next++;
  struct frame* frame = bpf_map_lookup_elem(&frames, &number);
  if (!frame) return XDP_ABORTED;
  __u64* to = data;
  for (__u32 word = 0; word < FRAME_BYTES / 8; word++) to[word] = frame->words[word];
  for (__u32 byte = FRAME_BYTES / 8 * 8; byte < FRAME_BYTES; byte++) ((__u8*)data)[byte] = ((__u8*)frame)[byte];
  __u16 port = bpf_htons(at->udp_port);
  *(__u16*)(data + PORT_AT) = port;
  __u32 sum = (__u16) ~*(__u16*)(data + CHECKSUM_AT) + port;
  sum = (sum & 0xffff) + (sum >> 16);
  sum = (sum & 0xffff) + (sum >> 16);
  // RFC 8200, 8.1: a computed 0 is sent as its complement.
  *(__u16*)(data + CHECKSUM_AT) = (__u16)~sum ? ~sum : 0xffff;
  return bpf_redirect(at->interface_index, 0);
}

// Drops every frame, as a link without a receiver does.
SEC("xdp")
int drop_frame(struct xdp_md* context) { return XDP_DROP; }

char licence[] SEC("license") = "Dual BSD/GPL";
