// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <array>
#include <cstdint>
#include <string_view>

namespace sennit::flow {

enum class Mechanism : uint8_t {
  order_time,      // a later packet of its path was acknowledged, and the reorder window has passed
  silence,         // lost, because packets of other paths that were sent a round trip later arrived
  rail_verdict,    // the paths of a silent rail become bad together
  doubt,           // no data on a path that others have overtaken, before the verdict
  bad_paths,       // no data on a path that does not answer
  path_probes,     // control packets ask whether a bad path is back
  question,        // two probes that arrive only over another path make theirs bad
  tail_probe,      // when nothing is heard, the oldest packet goes again
  tail_timer,      // the probe of a message's end does not wait for the acknowledgement's delay
  probe_mark,      // a mark behind the probe
  rail_marks,      // marks on all rails behind a second probe
  tail_marks,      // marks behind the last data, where losses were found lately
  confirm_marks,   // marks, if a verdict needs a later packet and none is in flight
  other_path,      // what was lost goes over another path
  path_limit,      // no path has more than half of the window
  ecn_skip,        // a marked path gets no data for a round trip
  repeat_control,  // in the middle of a message, a control goes out again if nothing comes
  second_answer,   // the answer to a repeated question goes out twice
  other_control,   // repeated controls try the other paths
  report_all,      // the answer to a mark shows all incomplete messages
  hurry_end,       // a part whose last packet is there is acknowledged soon
  hurry_gap,       // with one path, so is a gap
  hurry_first,     // and the first packet of a rail
  advert_retry,    // adverts go again if nothing shows that they arrived
  advert_gap,      // ... and sooner if a later one arrived
};

inline constexpr auto MECHANISMS = std::to_array<std::string_view>(
    {"order_time", "silence",     "rail_verdict",   "doubt",         "bad_paths",     "path_probes",   "question",
     "tail_probe", "tail_timer",  "probe_mark",     "rail_marks",    "tail_marks",    "confirm_marks", "other_path",
     "path_limit", "ecn_skip",    "repeat_control", "second_answer", "other_control", "report_all",    "hurry_end",
     "hurry_gap",  "hurry_first", "advert_retry",   "advert_gap"});
static_assert(MECHANISMS.size() == static_cast<size_t>(Mechanism::advert_gap) + 1);

}  // namespace sennit::flow
