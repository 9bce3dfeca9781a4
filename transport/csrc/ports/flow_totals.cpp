// SPDX-License-Identifier: Apache-2.0
#include "ports/flow_totals.hpp"

#include <algorithm>

namespace sennit {

void add_to_totals(flow::FlowCounters& totals, const flow::FlowCounters& one) {
  totals.data_packets_sent += one.data_packets_sent;
  totals.data_packets_received += one.data_packets_received;
  totals.data_bytes_sent += one.data_bytes_sent;
  totals.data_bytes_received += one.data_bytes_received;
  totals.control_packets_sent += one.control_packets_sent;
  totals.control_packets_received += one.control_packets_received;
  totals.retransmitted_packets += one.retransmitted_packets;
  totals.duplicate_packets += one.duplicate_packets;
  totals.out_of_sequence += one.out_of_sequence;
  totals.local_ack_timeout_err += one.local_ack_timeout_err;
  totals.tail_probe_packets += one.tail_probe_packets;
  totals.bad_key_packets += one.bad_key_packets;
  totals.bad_range_packets += one.bad_range_packets;
  totals.bad_slot_packets += one.bad_slot_packets;
  totals.bad_control_packets += one.bad_control_packets;
  totals.np_ecn_marked_roce_packets += one.np_ecn_marked_roce_packets;
  totals.path_state_changes += one.path_state_changes;
  totals.path_probe_packets += one.path_probe_packets;
  totals.paths_readmitted += one.paths_readmitted;
  totals.credit_stalls += one.credit_stalls;
  totals.window_packets = std::max(totals.window_packets, one.window_packets);
  totals.rtt_us = std::max(totals.rtt_us, one.rtt_us);
  totals.rto_us = std::max(totals.rto_us, one.rto_us);
}

void append_totals(CounterList& out, const flow::FlowCounters& totals) {
  out.insert(out.end(), {{"data_packets_sent", totals.data_packets_sent},
                         {"data_packets_received", totals.data_packets_received},
                         {"data_bytes_sent", totals.data_bytes_sent},
                         {"data_bytes_received", totals.data_bytes_received},
                         {"control_packets_sent", totals.control_packets_sent},
                         {"control_packets_received", totals.control_packets_received},
                         {"retransmitted_packets", totals.retransmitted_packets},
                         {"duplicate_packets", totals.duplicate_packets},
                         {"out_of_sequence", totals.out_of_sequence},
                         {"local_ack_timeout_err", totals.local_ack_timeout_err},
                         {"tail_probe_packets", totals.tail_probe_packets},
                         {"bad_control", totals.bad_control_packets},
                         {"np_ecn_marked_roce_packets", totals.np_ecn_marked_roce_packets},
                         {"path_state_changes", totals.path_state_changes},
                         {"path_probe_packets", totals.path_probe_packets},
                         {"paths_readmitted", totals.paths_readmitted},
                         {"credit_stalls", totals.credit_stalls},
                         {"window_packets", totals.window_packets},
                         {"rtt_us", totals.rtt_us},
                         {"rto_us", totals.rto_us}});
}

}  // namespace sennit
