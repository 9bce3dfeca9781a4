// SPDX-License-Identifier: Apache-2.0
// Sends prepared frames again and again, for batch after batch: the load of `sennit bench offload --end-to-end`. Each
// run with BPF_F_TEST_XDP_LIVE_FRAMES sends one frame to an interface, without a socket.
#include "feed.h"

// Bytes of every frame. The loader sets it, and the size of the values in `frames`, which is not below.
const volatile __u32 frame_bytes = 256;

#define PORT_AT (sizeof(struct ethhdr) + sizeof(struct ipv6hdr) + 2)
#define CHECKSUM_AT (sizeof(struct ethhdr) + sizeof(struct ipv6hdr) + 6)

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, 1);  // the loader sets it
  __type(key, __u32);
  __uint(value_size, 256);  // the loader sets it
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
  __u32 zero = 0;
  struct frames_state* at = bpf_map_lookup_elem(&state, &zero);
  if (!at) return XDP_ABORTED;
  __u32 number = at->next++;
  void* frame = bpf_map_lookup_elem(&frames, &number);
  if (!frame || bpf_xdp_store_bytes(context, 0, frame, frame_bytes)) return XDP_ABORTED;
  void *data = (void*)(long)context->data, *data_end = (void*)(long)context->data_end;
  if (data + CHECKSUM_AT + 2 > data_end) return XDP_ABORTED;
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
