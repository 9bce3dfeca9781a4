// SPDX-License-Identifier: Apache-2.0
// One simulated run as data: the fabric, its failures, the transport. A result is a pure function of it and
// of the plans.
#pragma once
#include <cstdint>

#include "flow/flow.hpp"

namespace sennit::fabric {

// Two tiers: every leaf has one link to every spine. Three tiers (leaves_per_pod != 0): the leaves of a pod have
// one link to each of the pod's `spines`, and spine i of every pod has one to each of the `cores_per_spine` cores of
// its group i (Al-Fares et al., SIGCOMM 2008).
struct TopologyConfig {
  uint32_t hosts = 1'024;
  uint32_t hosts_per_leaf = 32;
  uint32_t spines = 32;          // of the fabric; with three tiers, of each pod
  uint32_t leaves_per_pod = 0;   // 0: two tiers
  uint32_t cores_per_spine = 0;  // three tiers only
};

struct LinkConfig {
  uint32_t rate_gbps = 100;
  uint32_t delay_ns = 1'000;               // one hop: cable and switch pipeline
  uint32_t queue_limit_bytes = 1'048'576;  // per switch port; drops packets that do not fit
  uint32_t mark_min_bytes = 131'072;       // ECN: a packet that finds fewer bytes is never marked ...
  uint32_t mark_max_bytes = 524'288;       // ... one that finds more is always marked; linear in between (RED, DCQCN)
};

struct FailureConfig {
  double fraction = 0;  // of the cables between switches
  uint64_t at_us = 0;
  uint64_t convergence_us = 0;  // until then switches hash packets onto dead links
};

struct TransportConfig {
  flow::FlowConfig flow{.path_count = 16,
                        .payload_max_bytes = 4'096,
                        .eager_slot_count = 8,
                        .window_bytes = 131'072,
                        .ack_every_packets = 16,
                        .ack_delay_us = 20,
                        .path_policy = "reps",
                        .congestion = "swift",
                        .target_queue_us = 25};
  uint64_t receive_budget_bytes = 0;  // the most that all senders to a host may have in flight; 0: no limit
  uint32_t batch_packets = 1;         // packets sent back to back on one path (a GSO batch), at most 64
  uint32_t turn_packets = 16;         // packets that a NIC takes from one of its flows before the next one's turn
  bool control_first = false;         // acknowledgements and adverts overtake data in queues
  // The floors of the flow's timers suit hosts whose cores also run other programs: 1 ms for the tail probe, 5 ms for
  // the retransmission timeout. A flow knows no clock. So a NIC's shorter timers are the same code on a clock that
  // ticks faster: so many times a microsecond. Times in `flow` stay in microseconds.
  uint32_t ticks_per_us = 1;
};

struct SimulationConfig {
  TopologyConfig topology;
  LinkConfig link;
  FailureConfig failure;
  TransportConfig transport;
  uint64_t seed = 1;
  uint64_t deadline_us = 10'000'000;  // in virtual time
  uint64_t sample_us = 100;           // resolution of the goodput over time
};

inline constexpr uint64_t PS_PER_US = 1'000'000;
inline constexpr uint64_t PS_PER_NS = 1'000;

}  // namespace sennit::fabric
