// SPDX-License-Identifier: Apache-2.0
// One path of the verbs port: one of our queue pairs, and where it leads.
#pragma once

#include <cstdint>
#include <memory>

#include "flow/flow.hpp"
#include "ports/verbs_port.hpp"

namespace sennit {

struct VerbsPort::Path {
  VerbsQueuePair queue;
  VerbsAdapter* adapter = nullptr;  // the device that has it
  uint16_t number = 0;              // in paths_
  uint32_t rail = 0;                // ours
  uint8_t generation = 0;           // revivals
  bool is_broken = false;           // its queue pair is in error
  flow::Flow* flow = nullptr;       // once the peer is connected
  uint32_t index = 0;               // the flow's name for it
  Peer* peer = nullptr;
};

struct VerbsPort::Peer {
  uint32_t rank = 0;
  bool is_device = false;
  std::vector<Path*> paths;  // by the flow's index
  size_t rail_count = 0;     // path p uses rail p mod rail_count
  std::unique_ptr<FlowLane> lane;
  uint64_t eager_address = 0;  // key of our own ring, which no packet names
  uint32_t payload_max_bytes = 0;
};

}  // namespace sennit
