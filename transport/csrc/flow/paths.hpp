// SPDX-License-Identifier: Apache-2.0
// The paths (entropies) between two ranks: what each has in flight and how it does.
//
// Every path is taken to be in order by itself; packets of different paths overtake each other freely. Path p
// runs over rail p mod rail_count (docs/wire.md, "Offer"): paths of one rail are likely to fail together.
#pragma once
#include <algorithm>
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

struct Path {
  RecordList in_flight;  // in order of sending
  uint32_t in_flight_packets = 0;
  uint64_t next_order = 1;
  uint64_t newest_acked_order = 0;
  uint64_t last_sent_us = 0, last_ack_us = 0;
  uint64_t answered_us = 0;  // when the peer last proved that something arrived over it
  PathState state = PathState::good;
  uint64_t until_us = 0;     // skip: its end. Bad: next try. Probing: next probe
  uint32_t timeouts = 0;     // in a row, of the retransmission timer
  uint32_t silences = 0;     // in a row: losses of all that was on it, without an acknowledgement
  uint32_t probes = 0;       // since it is bad
  bool probe_due = false;    // tail probe wanted
  uint32_t tail_probes = 0;  // since its last acknowledgement, the newest at probed_us
  uint64_t probed_us = 0;
  uint64_t mark_order = 0;            // of the newest tail mark (Recovery::take_tail_mark)
  uint16_t mark_number = 0;           // its probe number
  bool is_mark_open = false;          // not answered
  uint16_t received = 0, marked = 0;  // the peer's counts of arrivals over it, modulo 2^16
  RoundTrip round_trip;

  bool is_bad() const { return state == PathState::bad || state == PathState::probing; }
};

class Paths {
 public:
  static constexpr uint32_t NONE = UINT32_MAX;

  Paths(uint32_t count, uint32_t rail_count)
      : paths_(count), rail_count_(rail_count), fabric_min_us_(rail_count, UINT64_MAX) {}
  uint32_t count() const { return static_cast<uint32_t>(paths_.size()); }
  Path& operator[](uint32_t index) { return paths_[index]; }
  const Path& operator[](uint32_t index) const { return paths_[index]; }
  uint32_t rail_count() const { return rail_count_; }
  uint32_t rail_of(uint32_t path) const { return path % rail_count_; }

  // The least round trip in the fabric that any path of the rail showed. Paths of one rail join the same two
  // interfaces; one that was first used when a queue stood already could not tell the queue from the way.
  uint64_t fabric_min_us(uint32_t path) const { return fabric_min_us_[rail_of(path)]; }
  void note_fabric_us(uint32_t path, uint64_t fabric_us) {
    uint64_t& min_us = fabric_min_us_[rail_of(path)];
    min_us = std::min(min_us, fabric_us);
  }

  // A path that holds more than its share does not get the rest as well: were it dead, all would wait for it.
  void set_in_flight_limit(uint32_t packets) { in_flight_limit_ = packets; }
  // May be chosen for data now.
  bool offers(uint32_t index, uint64_t now_us) const {
    const Path& path = paths_[index];
    if (path.is_bad() || path.in_flight_packets >= in_flight_limit_) return false;
    return path.state == PathState::good || path.until_us <= now_us;
  }
  uint32_t bad_count() const {
    return static_cast<uint32_t>(std::ranges::count_if(paths_, [](const Path& path) { return path.is_bad(); }));
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
  const uint32_t rail_count_;
  std::vector<uint64_t> fabric_min_us_;  // by rail
  uint32_t in_flight_limit_ = UINT32_MAX;
};

}  // namespace sennit::flow
