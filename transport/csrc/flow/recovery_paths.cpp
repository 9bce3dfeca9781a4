// SPDX-License-Identifier: Apache-2.0
// How paths become bad, what this says about their rail, and how they come back.
#include <algorithm>

#include "flow/recovery.hpp"

namespace sennit::flow {
namespace {

// On average it takes half of this to find a healed path. A dead path costs 20 small packets a second.
constexpr uint64_t PATH_PROBE_MAX_US = 50'000;
constexpr uint64_t PATH_PROBE_MIN_US = 1'000;
constexpr uint32_t PATH_PROBE_DOUBLINGS = 6;
// Between two probes of any paths: with 256 dead paths, probes still cost almost nothing.
constexpr uint64_t PATH_PROBE_GAP_US = 250;

}  // namespace

void Recovery::set_state(Path& path, PathState state) {
  if (path.state == state) return;
  const auto index = static_cast<uint32_t>(&path - &paths_[0]);
  trace::path_state(ends_, index, static_cast<uint32_t>(path.state), static_cast<uint32_t>(state));
  path_counters_[index]->state = static_cast<uint64_t>(state);
  const bool was_bad = path.is_bad();
  path.state = state;
  if (path.is_bad() && !was_bad) ++bad_paths_;
  if (!path.is_bad() && was_bad) --bad_paths_;
  ++counters_.path_state_changes;
}

void Recovery::on_answer(uint64_t now_us, Path& path) {
  path.question = 0;
  path.silences = 0;
  if (!path.is_bad()) return;
  set_state(path, PathState::good);
  ++counters_.paths_readmitted;
  path.probes = 0;
  // The rail answers, so its other paths are worth a probe at once.
  const uint32_t rail = paths_.rail_of(static_cast<uint32_t>(&path - &paths_[0]));
  for (uint32_t index = rail; index < paths_.count(); index += paths_.rail_count())
    if (paths_[index].is_bad()) paths_[index].until_us = now_us;
}

void Recovery::note_arrivals(uint64_t now_us, const Echo& echo, uint64_t fabric_us) {
  Path& path = paths_[echo.path];
  // Counts are cumulative, so a lost or overtaken control is harmless: an old one differs by half the circle or more.
  const auto received = static_cast<uint16_t>(echo.received - path.received);
  const auto marked = static_cast<uint16_t>(echo.marked - path.marked);
  if (received == 0 || received >= 0x8000) return;
  path.received = echo.received;
  path.marked = echo.marked;
  path_counters_[echo.path]->ecn_marked_packets += std::min(marked, received);
  paths_.rail(echo.path).reported_serial = next_serial_;
  on_answer(now_us, path);
  if (fabric_us != 0) paths_.rail(echo.path).fabric_min.add(now_us, fabric_us);
  const PathFeedback feedback{
      now_us, echo.path, received, std::min(marked, received), fabric_us, paths_.fabric_min_us(echo.path)};
  if (fabric_us != 0) newest_queue_us_ = std::max<uint64_t>(feedback.standing_queue_us(), 1);
  policy_->on_feedback(feedback);
  congestion_->on_feedback(feedback, paths_.count() - bad_paths_, in_flight_);
  note_window();
  if (feedback.marked_packets != 0 && uses(Mechanism::ecn_skip)) {
    set_state(path, PathState::skip);
    path.until_us = now_us + round_trip(path).smoothed_us();
  } else {
    set_state(path, PathState::good);
  }
}

uint64_t Recovery::take_queue_us() {
  const uint64_t queue_us = newest_queue_us();
  newest_queue_us_ = 0;
  is_overflowing_ = false;
  return queue_us;
}

void Recovery::make_bad(uint64_t now_us, uint32_t index) {
  Path& path = paths_[index];
  while (!path.in_flight.empty()) mark_lost(path, path.in_flight.head);
  path.is_doubted = false;
  if (path.is_bad() || !uses(Mechanism::bad_paths)) return;
  set_state(path, PathState::bad);
  path.probes = 0;
  path.until_us = now_us;
}

// `index` went silent while others answer. If nothing sent since then came over any path of its rail, the rail is gone.
// Then the other paths need not find that out one after the other.
void Recovery::make_rail_bad(uint64_t now_us, uint32_t index, uint64_t silent_since) {
  make_bad(now_us, index);
  if (paths_.rail_count() == 1 || !uses(Mechanism::rail_verdict)) return;
  const uint32_t rail = paths_.rail_of(index);
  if (paths_.rail(index).arrived.serial > silent_since) return;
  for (uint32_t other = rail; other < paths_.count(); other += paths_.rail_count())
    if (!paths_[other].is_bad()) make_bad(now_us, other);
}

// While the peer answers nowhere, data itself tries the paths, with back-off, so that a slow peer is not flooded.
bool Recovery::may_probe() const {
  return uses(Mechanism::path_probes) && bad_paths_ != 0 && bad_paths_ != paths_.count() && outstanding_.size() != 0;
}

uint64_t Recovery::next_path_probe_us() const {
  if (!may_probe()) return UINT64_MAX;
  uint64_t next_us = UINT64_MAX;
  for (uint32_t index = 0; index < paths_.count(); ++index)
    if (paths_[index].is_bad()) next_us = std::min(next_us, paths_[index].until_us);
  return std::max(next_us, path_probed_us_ + PATH_PROBE_GAP_US);
}

bool Recovery::take_path_probe(uint64_t now_us, uint32_t& index) {
  if (next_path_probe_us() > now_us) return false;
  index = 0;
  for (uint32_t other = 0; other < paths_.count(); ++other)
    if (paths_[other].is_bad() && (!paths_[index].is_bad() || paths_[other].until_us < paths_[index].until_us))
      index = other;
  Path& path = paths_[index];
  set_state(path, PathState::probing);
  const uint64_t wait_us = std::max(2 * round_trip_.smoothed_us(), PATH_PROBE_MIN_US) << path.probes;
  path.probes = std::min(path.probes + 1, PATH_PROBE_DOUBLINGS);
  path.until_us = now_us + std::min(wait_us, PATH_PROBE_MAX_US);
  path_probed_us_ = now_us;
  ++probe_number_;
  ++counters_.path_probe_packets;
  return true;
}

}  // namespace sennit::flow
