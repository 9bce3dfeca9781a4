// SPDX-License-Identifier: Apache-2.0
// Lets several receivers share an interface, which takes one program. Each receiver has a UDP port and gets its packets
// by a tail call. Packets for other ports, or for a receiver that is not there, go on to the host.
#include "feed.h"

struct {
  __uint(type, BPF_MAP_TYPE_PROG_ARRAY);
  __uint(max_entries, 1);  // the loader sets it
  __type(key, __u32);
  __type(value, __u32);
} receivers SEC(".maps");

const volatile __u32 first_port = 0;

SEC("xdp")
int dispatch(struct xdp_md* context) {
  void *data = (void*)(long)context->data, *data_end = (void*)(long)context->data_end;
  struct feed_datagram found = feed_find(data, data_end, 0);
  if (found.at && found.port >= first_port) bpf_tail_call(context, &receivers, found.port - first_port);
  return XDP_PASS;
}

char licence[] SEC("license") = "Dual BSD/GPL";
