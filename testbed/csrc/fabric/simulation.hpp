// SPDX-License-Identifier: Apache-2.0
// One run: puts the parts together, runs the event loop, collects the result.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fabric/config.hpp"
#include "flow/flow.hpp"

namespace sennit::fabric {

struct LinkUse {
  enum class Tier : uint8_t { host_up, leaf_up, spine_up, spine_down, leaf_down, host_down } tier;
  bool has_failed;
  double fraction;  // share of the run's time in which the link was sending
  uint64_t peak_queue_bytes, dropped_packets;
};

struct SimulationResult {
  bool is_complete;     // every rank finished its plan before the deadline
  std::string failure;  // why a rank could not go on; empty if all could
  double completion_us, ideal_us;
  uint64_t trace_hash;  // over every delivered packet: equal for equal configurations
  uint64_t events, connections, messages, message_bytes;
  uint64_t sent_packets, delivered_packets, queue_dropped_packets, black_holed_packets, marked_packets, hops;
  uint64_t in_flight_packets, stale_packets;
  flow::FlowCounters flow;
  std::vector<float> message_us;
  std::vector<uint64_t> arrived_bytes;  // per sample
  std::vector<LinkUse> links;
};

struct Traffic {
  uint32_t from, to;
  uint64_t messages, bytes;
};

class Simulation {
 public:
  // Throws std::invalid_argument for a configuration out of range.
  explicit Simulation(const SimulationConfig& config);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // Adds the plan of the next rank, in its binary form (docs/reference/plans.md), and the counts that a post gives.
  // Throws PlanError, or std::invalid_argument for a plan of another rank or world.
  void add_rank(std::span<const std::byte> plan, std::span<const uint64_t> counts);
  // Processes at most this many events. Returns false when the run is over. Throws
  // std::invalid_argument if a host has no plan.
  bool advance(uint64_t events_max);
  uint64_t now_us() const;
  SimulationResult result() const;
  // What each rank received from each other one, as its mailbox saw it.
  std::vector<Traffic> traffic() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sennit::fabric
