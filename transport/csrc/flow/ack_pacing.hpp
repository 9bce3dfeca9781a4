// SPDX-License-Identifier: Apache-2.0
// When arrivals are acknowledged: after a number of packets, at the end of a message, or after a delay.
//
// Packets of different paths overtake each other all the time, so a gap is no reason to acknowledge at once. The sender
// finds losses by the order within each path, when a later packet is acknowledged. On a single path a gap is a loss.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "flow/flow.hpp"
#include "flow/mechanisms.hpp"

namespace sennit::flow {

class AckPacing {
 public:
  explicit AckPacing(const FlowConfig& config)
      // At least twice in each window (equal on both sides). Otherwise the sender would wait for the timer.
      : every_packets_(std::clamp(config.window_bytes / config.payload_max_bytes / 2, 1u, config.ack_every_packets)),
        delay_us_(config.ack_delay_us),
        is_single_path_(config.path_count == 1),
        is_rail_heard_(config.rail_count) {}

  struct Arrival {
    uint32_t path = 0;
    bool in_order = true;
    bool message_complete = false;
    bool ends_short = false;  // the last packet of its part while others are missing, lost or on another path
  };
  // How long the acknowledgement of this arrival may wait. 0: it is due now.
  uint64_t wait_us(const Arrival& arrival) {
    // The first arrival over a rail shows the rail's round-trip time before a queue has grown.
    const size_t rail = arrival.path % is_rail_heard_.size();
    const bool is_first_on_rail = !is_rail_heard_[rail];
    is_rail_heard_[rail] = true;
    if (++unacknowledged_packets_ >= every_packets_ || arrival.message_complete) return 0;
    const bool is_gap = uses(Mechanism::hurry_gap) && is_single_path_ && !arrival.in_order;
    return is_gap || (arrival.ends_short && uses(Mechanism::hurry_end)) ||
                   (is_first_on_rail && uses(Mechanism::hurry_first))
               ? hurried_us()
               : delay_us_;
  }
  // Also for packets that the sender repeats, because it missed an acknowledgement.
  uint64_t hurried_us() const { return delay_us_ / HURRY; }
  void on_acknowledged() { unacknowledged_packets_ = 0; }

 private:
  static constexpr uint64_t HURRY = 16;

  const uint32_t every_packets_;
  const uint64_t delay_us_;
  const bool is_single_path_;
  std::vector<bool> is_rail_heard_;
  uint32_t unacknowledged_packets_ = 0;
};

}  // namespace sennit::flow
