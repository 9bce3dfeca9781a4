// SPDX-License-Identifier: Apache-2.0
// What a flow counts. Names follow the RDMA hw_counters where one exists; docs/reference/counters.md says what each
// means.
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
  uint64_t credit_stalls;                                             // waits for a larger grant of the receiver
  uint64_t window_packets;                                            // of the congestion control, now
  uint64_t rtt_us, rto_us;

  // gauge: a time or a size; of several flows the largest is of interest, not the sum.
  enum class Kind : uint8_t { count, refusal, gauge };
  struct Field {
    const char* name;
    uint64_t FlowCounters::*value;
    Kind kind = Kind::count;
  };
  static std::span<const Field> fields();  // in their order
  static constexpr const char* GROUP = "flow";
  static std::vector<std::string> names();
};

// The counters of a port's flows together: counts are added, of times and windows the largest is kept.
void add_to_totals(FlowCounters& totals, const FlowCounters& one);
// All but the refusals, which a port counts together with its own.
void append_totals(CounterList& out, const FlowCounters& totals);

struct PathCounters {
  uint64_t data_packets_sent, retransmitted_packets;  // the second: of the first
  uint64_t lost_packets;                              // the peer's answers say so
  uint64_t ecn_marked_packets;                        // arrived marked, as the peer reports
  uint64_t rtt_us, state;                             // smoothed; PathState

  static constexpr const char* GROUP = "path";
  static std::vector<std::string> names();
};

}  // namespace sennit::flow
