// SPDX-License-Identifier: Apache-2.0
// The paths (entropies) between two ranks: what each has in flight, how it does, which one is next.
//
// Every path is taken to be in order by itself; packets of different paths overtake each other freely.
#pragma once
#include <cstdint>
#include <vector>

#include "flow/outstanding.hpp"
#include "flow/rtt.hpp"

namespace sennit::flow {

struct Path {
  RecordList in_flight;  // in order of sending
  uint64_t next_order = 1;
  uint64_t newest_acked_order = 0;
  uint64_t last_sent_us = 0, last_ack_us = 0;
  uint64_t suspended_until_us = 0;
  uint32_t timeouts = 0;    // in a row, without an acknowledgement
  bool probe_due = false;   // tail probe wanted
  bool probe_sent = false;  // at most one between acknowledgements
  RoundTrip round_trip;
};

class Paths {
 public:
  Paths(uint32_t count, uint64_t seed) : paths_(count), cursor_(static_cast<uint32_t>(seed % count)) {}
  uint32_t count() const { return static_cast<uint32_t>(paths_.size()); }
  Path& operator[](uint32_t index) { return paths_[index]; }
  const Path& operator[](uint32_t index) const { return paths_[index]; }

  // Round robin over the paths that are not suspended; not `avoided` while there is another one. When all
  // are suspended, the one that comes back first. A path whose suspension has ended is offered again: the
  // packets it gets then are its probe.
  uint32_t choose(uint64_t now_us, uint32_t avoided) {
    uint32_t soonest = cursor_, fallback = NONE;
    for (uint32_t step = 1; step <= count(); ++step) {
      const uint32_t candidate = (cursor_ + step) % count();
      if (paths_[candidate].suspended_until_us < paths_[soonest].suspended_until_us) soonest = candidate;
      if (paths_[candidate].suspended_until_us > now_us) continue;
      if (candidate != avoided) return cursor_ = candidate;
      fallback = candidate;
    }
    return cursor_ = fallback != NONE ? fallback : soonest;
  }
  static constexpr uint32_t NONE = UINT32_MAX;

 private:
  std::vector<Path> paths_;
  uint32_t cursor_;
};

}  // namespace sennit::flow
