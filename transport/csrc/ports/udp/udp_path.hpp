// SPDX-License-Identifier: Apache-2.0
// One path between two ranks: one of our source ports, an address of the peer, and a queue pair at each end.
#pragma once

#include <cstdint>

#include "flow/flow.hpp"
#include "ports/udp/udp_socket.hpp"
#include "trace/tracepoints.hpp"
#include "wire/icrc.hpp"
#include "wire/packet.hpp"

namespace sennit {

class Trial;
class UdpSender;

struct UdpPath {
  UdpPath(const wire::Endpoint& remote_listen) : remote_listen(remote_listen), remote(remote_listen) {}

  flow::Flow* flow = nullptr;  // null until the trial of the network is over
  Trial* trial = nullptr;      // null where there is none
  uint32_t trial_rkey = 0;     // for probes that come here: the key of the ring that the peer may write to
  trace::Ends ends{};
  uint32_t index = 0;           // the flow's name for it
  uint32_t number = 0;          // the trial's name for it
  size_t rail = 0;              // ours
  UdpSender* sender = nullptr;  // has the socket with this path's source port
  wire::Endpoint source, local_listen, remote_source, remote_listen;
  SocketAddress remote;  // the same, for sends
  uint32_t remote_qpn = 0;
  uint32_t next_psn = 0;
  int error = 0;                                           // errno of its last probe that was not sent or came back
  uint32_t payload_limit_bytes = wire::PAYLOAD_MAX_BYTES;  // of packets that come here
  bool is_over_mtu = false;                                // it did not take the last full packet
  bool is_to_device = false;  // a device, which takes eager packets as SEND ONLY with immediate
  wire::NetworkCrc outgoing, incoming;

  // The kernel takes packets to an address of its own host in at once: no link, no switch.
  bool stays_here() const { return source.address == remote_listen.address; }
};

}  // namespace sennit
