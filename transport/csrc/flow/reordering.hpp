// SPDX-License-Identifier: Apache-2.0
// Whether packets of one path overtake one another, and how long a gap is waited for then: RFC 8985's adaptive
// reordering window (6.2), a rail each, since all of its paths go through the same devices here and there.
//
// Three later packets condemn one only where that has not been wrong lately. Where it has, the time alone
// decides, and each round trip with another wrong verdict doubles it.
#pragma once
#include <algorithm>
#include <cstdint>

#include "flow/rtt.hpp"

namespace sennit::flow {

class Reordering {
 public:
  bool is_seen() const { return quarters_ != 0; }

  // A packet that was sent as `serial` was taken for lost because of later ones, and is there all the same.
  // `next_serial`: what is sent next; before that is answered, another one says nothing new.
  void on_wrong_verdict(uint64_t serial, uint64_t next_serial) {
    orderly_packets_ = 0;
    if (serial < answered_from_) return;
    answered_from_ = next_serial;
    quarters_ = std::clamp(quarters_ * 2, 1u, QUARTERS_MAX);
  }
  // A packet came: after later ones, or not.
  void on_arrival(bool is_overtaken) {
    orderly_packets_ = is_overtaken ? 0 : orderly_packets_ + 1;
    if (orderly_packets_ >= ORDERLY_PACKETS) quarters_ = 0;
  }

  // How long after sending a packet is lost once a later one of its path is there.
  uint64_t deadline_us(const RoundTrip& round_trip) const {
    return round_trip.smoothed_us() + window_us(round_trip, std::max(quarters_, 1u));
  }
  // So much delay says nothing of a queue, as queues do not reorder.
  uint64_t jitter_us(const RoundTrip& round_trip) const { return is_seen() ? window_us(round_trip, quarters_) : 0; }

 private:
  static uint64_t window_us(const RoundTrip& round_trip, uint32_t quarters) {
    return std::max(round_trip.smoothed_us() * quarters / 4, REORDER_MIN_US);
  }
  // RFC 8985, 6.2: the window is bounded by SRTT.
  static constexpr uint32_t QUARTERS_MAX = 4;
  // So many in order, and it is forgotten: a route may change.
  static constexpr uint32_t ORDERLY_PACKETS = 65'536;
  uint32_t quarters_ = 0;  // of a round trip
  uint32_t orderly_packets_ = 0;
  uint64_t answered_from_ = 0;
};

}  // namespace sennit::flow
