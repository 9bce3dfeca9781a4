// SPDX-License-Identifier: Apache-2.0
// Sends every frame back to where it came from and touches nothing else: what `sennit bench aggregate` compares with.
#include <linux/bpf.h>
#include <linux/if_ether.h>

#include <bpf/bpf_helpers.h>

SEC("xdp")
int forward(struct xdp_md* context) {
  struct ethhdr* ether = (void*)(long)context->data;
  if ((void*)(ether + 1) > (void*)(long)context->data_end) return XDP_DROP;
  unsigned char hardware[ETH_ALEN];
  __builtin_memcpy(hardware, ether->h_dest, ETH_ALEN);
  __builtin_memcpy(ether->h_dest, ether->h_source, ETH_ALEN);
  __builtin_memcpy(ether->h_source, hardware, ETH_ALEN);
  return XDP_TX;
}

char licence[] SEC("license") = "Dual BSD/GPL";
