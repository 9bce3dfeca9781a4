// SPDX-License-Identifier: Apache-2.0
// The counters of a flow. Names follow the RDMA hw_counters if there is one. docs/reference/counters.md explains them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "telemetry/counter_page.hpp"

namespace sennit::flow {

struct FlowCounters {
  uint64_t data_packets_sent, data_packets_received, data_bytes_sent, data_bytes_received;
  uint64_t control_packets_sent, control_packets_received;
  uint64_t retransmitted_packets, duplicate_packets, out_of_sequence, local_ack_timeout_err, tail_probe_packets;
  uint64_t bad_key, bad_range, bad_slot, bad_control;                 // packets refused
  uint64_t np_ecn_marked_roce_packets;                                // received with a congestion mark
  uint64_t path_state_changes, path_probe_packets, paths_readmitted;  // paths.hpp
  uint64_t credit_stalls;                                             // times that the sender waited for a larger grant
  uint64_t window_packets;                                            // window of the congestion control, now
  uint64_t rtt_us, rto_us;

  // gauge: a time or a size; of several flows the largest is kept, not the sum
  enum class Kind : uint8_t { count, refusal, gauge };
  struct Field {
    const char* name;
    uint64_t FlowCounters::*value;
    Kind kind = Kind::count;
  };
  static std::span<const Field> fields();  // in the order of the names
  static constexpr const char* GROUP = "flow";
  static std::vector<std::string> names();
};

// The counters of all flows of a port: counts are added, and of times and windows the largest is kept.
void add_to_totals(FlowCounters& totals, const FlowCounters& one);
// All except the refusals, which a port adds to its own.
void append_totals(CounterList& out, const FlowCounters& totals);

struct PathCounters {
  uint64_t data_packets_sent, retransmitted_packets;  // the second: part of the first
  uint64_t lost_packets;                              // as the peer's answers say
  uint64_t ecn_marked_packets;                        // arrived marked, as the peer reports
  uint64_t rtt_us, state;                             // the smoothed round-trip time; PathState

  static constexpr const char* GROUP = "path";
  static std::vector<std::string> names();
};

}  // namespace sennit::flow
