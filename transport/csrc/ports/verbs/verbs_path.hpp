// SPDX-License-Identifier: Apache-2.0
// One path of the verbs port: one of our queue pairs, and where it leads.
#pragma once

#include <cstdint>
#include <memory>

#include "flow/flow.hpp"
#include "ports/verbs/verbs_port.hpp"

namespace sennit {

struct VerbsPort::Path {
  VerbsQueuePair queue;
  VerbsAdapter* adapter = nullptr;  // the device that has it
  uint16_t number = 0;              // in paths_
  uint32_t rail = 0;                // ours
  uint8_t generation = 0;           // revivals
  bool is_broken = false;           // its queue pair is in error
  flow::Flow* flow = nullptr;       // once the trial is over
  uint32_t index = 0;               // the trial's and the flow's name for it
  int error = 0;                    // errno of the trial
  wire::Endpoint source{}, remote_source{}, remote_listen{};
  Peer* peer = nullptr;  // once its queue pair is connected
};

struct VerbsPort::Peer {
  uint32_t rank = 0;
  RoceOffer offer;  // the peer's
  LaneSink* sink = nullptr;
  std::vector<Path*> paths;        // by the flow's index
  size_t rail_count = 0;           // path p uses rail p mod rail_count
  std::unique_ptr<Trial> trial;    // null: not tried
  std::unique_ptr<FlowLane> lane;  // null until the trial is over
  uint64_t eager_address = 0;      // key of our own ring, which no packet names
  uint32_t payload_max_bytes = 0;  // of a packet; once there is a lane, what the trial found
};

}  // namespace sennit
