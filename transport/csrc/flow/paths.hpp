// SPDX-License-Identifier: Apache-2.0
// The paths (entropies) between two ranks: what each has in flight and how it does.
//
// Every path is taken to be in order by itself; packets of different paths overtake each other freely. Path p
// runs over rail p mod rail_count (docs/reference/wire.md, "Offer"): paths of one rail are likely to fail together.
#pragma once

#include <cstdint>
#include <vector>

#include "flow/outstanding.hpp"
#include "flow/rtt.hpp"

namespace sennit::flow {

enum class PathState : uint8_t {
  good,
  skip,     // marked by ECN: not chosen for a round trip
  bad,      // not answering: not chosen until a probe comes back
  probing,  // bad, and a probe is out
};

// When a packet was given out, by the clock and by the running number over all paths.
struct Transmission {
  uint64_t serial = 0, sent_us = 0;
};

// Paths of one rail end in the same socket, which the peer reads in order of arrival.
struct Rail {
  RecentMinimum fabric_min;
  Transmission arrived;          // the youngest that is known to have arrived over it
  uint64_t reported_serial = 0;  // the next serial when an arrival over it was last reported
};

struct Path {
  RecordList in_flight;  // in order of sending
  uint32_t in_flight_packets = 0;
  uint64_t next_order = 1;
  uint64_t newest_acked_order = 0;
  PathState state = PathState::good;
  uint64_t until_us = 0;              // skip: its end. Bad: next try. Probing: next probe
  uint64_t question = 0;              // a probe with this serial took its packet elsewhere, and arrived there
  uint32_t silences = 0;              // in a row: losses of all that was on it, without an acknowledgement
  uint32_t probes = 0;                // since it is bad
  bool is_doubted = false;            // younger packets of other paths were acknowledged: these first
  Transmission mark;                  // the newest tail mark (Recovery::take_tail_mark)
  uint64_t mark_order = 0;            // its order
  uint16_t mark_number = 0;           // its probe number
  bool is_mark_open = false;          // not answered
  bool is_mark_wanted = false;        // now, whatever else
  uint16_t received = 0, marked = 0;  // the peer's counts of arrivals over it, modulo 2^16
  RoundTrip round_trip;               // as the sender sees it
  RoundTrip fabric_round_trip;        // without the waits inside both hosts

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

  // The least round trip in the fabric that any path of the rail showed lately. Paths of one rail join the same two
  // interfaces; one that was first used when a queue stood already could not tell the queue from the way.
  uint64_t fabric_min_us(uint32_t path) const { return rail(path).fabric_min.min_us(); }

  // A path that holds more than its share does not get the rest as well: were it dead, all would wait for it.
  void set_in_flight_limit(uint32_t packets) { in_flight_limit_ = packets; }
  // May be chosen for data now.
  bool offers(uint32_t index, uint64_t now_us) const {
    const Path& path = paths_[index];
    if (path.is_bad() || path.is_doubted || path.in_flight_packets >= in_flight_limit_) return false;
    return path.state == PathState::good || path.until_us <= now_us;
  }
  // When no path offers itself: one that is only held back, else the bad one whose turn comes first.
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
