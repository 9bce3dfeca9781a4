// SPDX-License-Identifier: Apache-2.0
#include "flow/counters.hpp"

#include <algorithm>

namespace sennit::flow {

std::span<const FlowCounters::Field> FlowCounters::fields() {
  using C = FlowCounters;
  static constexpr Field FIELDS[] = {
      {"data_packets_sent", &C::data_packets_sent},
      {"data_packets_received", &C::data_packets_received},
      {"data_bytes_sent", &C::data_bytes_sent},
      {"data_bytes_received", &C::data_bytes_received},
      {"control_packets_sent", &C::control_packets_sent},
      {"control_packets_received", &C::control_packets_received},
      {"retransmitted_packets", &C::retransmitted_packets},
      {"duplicate_packets", &C::duplicate_packets},
      {"out_of_sequence", &C::out_of_sequence},
      {"local_ack_timeout_err", &C::local_ack_timeout_err},
      {"tail_probe_packets", &C::tail_probe_packets},
      {"bad_key", &C::bad_key, Kind::refusal},
      {"bad_range", &C::bad_range, Kind::refusal},
      {"bad_slot", &C::bad_slot, Kind::refusal},
      {"bad_control", &C::bad_control},
      {"np_ecn_marked_roce_packets", &C::np_ecn_marked_roce_packets},
      {"path_state_changes", &C::path_state_changes},
      {"path_probe_packets", &C::path_probe_packets},
      {"paths_readmitted", &C::paths_readmitted},
      {"credit_stalls", &C::credit_stalls},
      {"window_packets", &C::window_packets, Kind::gauge},
      {"rtt_us", &C::rtt_us, Kind::gauge},
      {"rto_us", &C::rto_us, Kind::gauge},
  };
  static_assert(sizeof(FIELDS) / sizeof(Field) == sizeof(FlowCounters) / sizeof(uint64_t), "every field has a name");
  return FIELDS;
}

std::vector<std::string> FlowCounters::names() {
  std::vector<std::string> out;
  for (const Field& field : fields()) out.emplace_back(field.name);
  return out;
}

void add_to_totals(FlowCounters& totals, const FlowCounters& one) {
  for (const auto& [name, value, kind] : FlowCounters::fields())
    totals.*value =
        kind == FlowCounters::Kind::gauge ? std::max(totals.*value, one.*value) : totals.*value + one.*value;
}

void append_totals(CounterList& out, const FlowCounters& totals) {
  for (const auto& [name, value, kind] : FlowCounters::fields())
    if (kind != FlowCounters::Kind::refusal) out.emplace_back(name, totals.*value);
}

std::vector<std::string> PathCounters::names() {
  return {"data_packets_sent", "retransmitted_packets", "lost_packets", "ecn_marked_packets", "rtt_us", "state"};
}

}  // namespace sennit::flow
