// SPDX-License-Identifier: Apache-2.0
// The paths (entropies) between two ranks: what each has in flight, and its state.
//
// Packets of one path are expected to stay in order; packets of different paths overtake each other freely. Path p
// runs over rail p mod rail_count (docs/reference/wire.md, "Offer"): paths of one rail are likely to fail together.
#pragma once

#include <cstdint>
#include <vector>

#include "flow/outstanding.hpp"
#include "flow/rtt.hpp"

namespace sennit::flow {

enum class PathState : uint8_t {
  good,
  skip,     // marked by ECN: not chosen for one round-trip time
  bad,      // does not answer: not chosen until a probe is answered
  probing,  // bad, and a probe is in flight
};

// When a packet was sent: the time, and its number over all paths.
struct Transmission {
  uint64_t serial = 0, sent_us = 0;
};

// The packets of a rail's paths end in the same socket, which the peer reads in order of arrival.
struct Rail {
  RecentMinimum fabric_min;
  Transmission arrived;          // the newest transmission that is known to have arrived over the rail
  uint64_t reported_serial = 0;  // recovery's next serial number when an arrival over the rail was last reported
};

struct Path {
  RecordList in_flight;  // in order of sending
  uint32_t in_flight_packets = 0;
  uint64_t next_order = 1;
  uint64_t newest_acked_order = 0;
  PathState state = PathState::good;
  uint64_t until_us = 0;              // skip: its end; bad: the next try; probing: the next probe
  uint64_t question = 0;              // serial of a probe that moved a packet to another path, where it arrived
  uint32_t silences = 0;              // how often in a row all packets on the path were lost without an acknowledgement
  uint32_t probes = 0;                // sent since the path became bad
  bool is_doubted = false;            // later packets of other paths were acknowledged before those of this path
  Transmission mark;                  // the newest tail mark (Recovery::take_tail_mark)
  uint64_t mark_order = 0;            // the order of the mark
  uint64_t mark_answered_below = 0;   // packets before it that its echo does not acknowledge are lost, without a wait
  uint16_t mark_number = 0;           // the mark's probe number
  bool is_mark_open = false;          // the mark is not answered yet
  bool is_mark_wanted = false;        // send a mark at the next chance
  uint16_t received = 0, marked = 0;  // the peer's counts of arrivals over the path, modulo 2^16
  RoundTrip round_trip;               // time from sending to acknowledgement
  RoundTrip fabric_round_trip;        // the same without the waits inside both hosts

  bool is_bad() const { return state == PathState::bad || state == PathState::probing; }
};

class Paths {
 public:
  static constexpr uint32_t NONE = UINT32_MAX;

  Paths(uint32_t count, uint32_t rail_count) : paths_(count), rails_(rail_count) {}
  uint32_t count() const { return static_cast<uint32_t>(paths_.size()); }
  Path& operator[](uint32_t index) { return paths_[index]; }
  const Path& operator[](uint32_t index) const { return paths_[index]; }
  uint32_t rail_count() const { return static_cast<uint32_t>(rails_.size()); }
  uint32_t rail_of(uint32_t path) const { return path % rail_count(); }
  Rail& rail(uint32_t path) { return rails_[rail_of(path)]; }
  const Rail& rail(uint32_t path) const { return rails_[rail_of(path)]; }

  // The minimum of recent fabric round-trip times over all paths of the rail, which join the same two interfaces. A
  // path that was first used when a queue had already formed could not tell the queue from the distance.
  uint64_t fabric_min_us(uint32_t path) const { return rail(path).fabric_min.min_us(); }

  // A limit for each path: if a dead path held all packets in flight, everything would wait for it.
  void set_in_flight_limit(uint32_t packets) { in_flight_limit_ = packets; }
  // May be chosen for data now.
  bool offers(uint32_t index, uint64_t now_us) const {
    const Path& path = paths_[index];
    if (path.is_bad() || path.is_doubted || path.in_flight_packets >= in_flight_limit_) return false;
    return path.state == PathState::good || path.until_us <= now_us;
  }
  // The choice if no path is available: a path that is only held back, else the next bad path in turn.
  uint32_t least_bad() const {
    uint32_t best = 0;
    for (uint32_t index = 1; index < count(); ++index) {
      const Path &one = paths_[index], &other = paths_[best];
      if (one.is_bad() != other.is_bad()) {
        if (other.is_bad()) best = index;
      } else if (one.is_bad() ? one.until_us < other.until_us : one.in_flight_packets < other.in_flight_packets) {
        best = index;
      }
    }
    return best;
  }

 private:
  std::vector<Path> paths_;
  std::vector<Rail> rails_;
  uint32_t in_flight_limit_ = UINT32_MAX;
};

}  // namespace sennit::flow
