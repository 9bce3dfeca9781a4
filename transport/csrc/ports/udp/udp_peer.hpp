// SPDX-License-Identifier: Apache-2.0
// The parts that the files of the udp port share: the sockets of a rail, the paths to a peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ports/flow_lane.hpp"
#include "ports/roce_offer.hpp"
#include "ports/trial.hpp"
#include "ports/udp/udp_port.hpp"

namespace sennit {

struct UdpPort::Rail {
  std::unique_ptr<UdpReceiver> receiver;
  std::vector<std::unique_ptr<UdpSender>> senders;  // by path
};

struct UdpPort::Peer {
  uint32_t rank;
  RoceOffer offer;  // the peer's
  LaneSink* sink;
  std::vector<UdpPath> paths;  // all that are tried
  std::vector<UdpPath*> used;  // by the flow, which has its own numbers for them; none before there is a lane
  size_t rail_count = 0;       // path p of the flow uses rail p mod rail_count
  uint32_t pair_count = 0;     // of rails, with the reserves that are tried
  std::vector<uint32_t> reserve_of;
  uint32_t payload_bytes = 0;  // payload of a full packet, once there is a lane
  uint32_t payload_max_bytes;  // what the interfaces at both ends take
  size_t batch_packets;
  std::unique_ptr<Trial> trial;    // null: not tried
  std::unique_ptr<FlowLane> lane;  // null until the trial is over
  uint32_t member;                 // of the port's agenda, once there is a lane
  // Nobody listens at the other end of this path any more. What the peer sent before that may wait in a socket still.
  const UdpPath* refused = nullptr;
  uint64_t refused_us = 0;
  bool is_gone = false;                                               // refused, and all that it sent is read
  bool is_refused() const { return refused != nullptr && !is_gone; }  // it is not judged yet
};

}  // namespace sennit
