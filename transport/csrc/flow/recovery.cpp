// SPDX-License-Identifier: Apache-2.0
#include "flow/recovery.hpp"

#include <algorithm>

namespace sennit::flow {
namespace {

// RFC 8985's DupThresh, RFC 5681's three duplicate acknowledgements.
constexpr uint64_t REORDER_PACKETS = 3;
// After a timeout without any answer: enough to find the peer again, too little to matter if it is only slow.
constexpr uint32_t SILENT_WINDOW_PACKETS = 8;
// Back-off doubles at most so often; RTO_MAX_US caps it anyway.
constexpr uint32_t BACKOFF_MAX = 10;
// All of so many packets lost in a row: no accident even where every fifth packet is lost.
constexpr uint32_t SILENT_PACKETS = 4;
// Lost at a time on a path that goes on answering: a queue overflowed.
constexpr uint32_t OVERFLOW_PACKETS = 8;
// A loss makes the next so many packets suspect.
constexpr uint32_t LOSSY_PACKETS = 65'536;
// Sent ahead of the pace, so that a late timer costs nothing.
constexpr uint64_t PACING_PERCENT = 80;
// Below this a batch takes longer to send than to wait for.
constexpr uint64_t PACING_MIN_US = 5;

uint64_t backed_off_us(const RoundTrip& round_trip, uint32_t timeouts) {
  return std::min(round_trip.rto_us() << std::min(timeouts, BACKOFF_MAX), RTO_MAX_US);
}

uint32_t window_packets(const FlowConfig& config) {
  return std::max(config.window_bytes / config.payload_max_bytes, SILENT_WINDOW_PACKETS);
}

}  // namespace

// Lost packets hold their record until they are acknowledged, hence room for more than the window.
Recovery::Recovery(const FlowConfig& config, FlowCounters& counters)
    : window_packets_(window_packets(config)),
      peer_ack_delay_us_(config.ack_delay_us),
      counters_(counters),
      outstanding_(window_packets_ * 2),
      paths_(config.path_count, config.rail_count),
      policy_(make_path_policy(config.path_policy, config.path_count, config.seed)),
      congestion_(
          make_congestion_control(config.congestion, {window_packets_, config.path_count, config.target_queue_us})) {
  note_window();
}

void Recovery::note_window() {
  counters_.window_packets = window_ = congestion_->window_packets();
  // Half of the window: two paths carry all of it, and a dead one stops no more than half.
  if (paths_.count() > 2) paths_.set_in_flight_limit(std::max(window_ / 2, 1u));
}

uint32_t Recovery::allowance() const {
  const uint32_t window = unanswered_timeouts_ != 0 ? std::min(SILENT_WINDOW_PACKETS, window_) : window_;
  return window > in_flight_ ? window - in_flight_ : 0;
}

uint32_t Recovery::choose_path(uint64_t now_us) {
  for (uint32_t index = 0; index < paths_.count(); ++index)
    if (paths_.offers(index, now_us))
      return policy_->choose(now_us, paths_, lost_.empty() ? Paths::NONE : outstanding_[lost_.head].path);
  const uint32_t path = paths_.least_bad();
  // All are bad: each gets its turn.
  if (paths_[path].is_bad()) paths_[path].until_us = std::max(paths_[path].until_us, now_us) + 1;
  return path;
}

void Recovery::launch(uint64_t now_us, uint32_t path_index, uint32_t id) {
  Path& path = paths_[path_index];
  Record& record = outstanding_[id];
  // Idle until now: the timers count from here, not from the last acknowledgement of long ago.
  if (path.in_flight.empty()) path.last_ack_us = now_us;
  outstanding_.push_back(path.in_flight, id);
  record.sent_us = now_us;
  record.order = path.next_order++;
  record.path = static_cast<uint16_t>(path_index);
  record.lost = false;
  if (record.transmissions < UINT8_MAX) ++record.transmissions;
  path.last_sent_us = now_us;
  if (lossy_packets_ != 0) --lossy_packets_;
  ++path.in_flight_packets;
  ++in_flight_;
  ++counters_.data_packets_sent;
  counters_.data_bytes_sent += record.packet.size_bytes;
  if (record.transmissions > 1) ++counters_.retransmitted_packets;
}

void Recovery::on_sent(uint64_t now_us, uint32_t path, const DataOut& packet) {
  launch(now_us, path, outstanding_.insert(packet));
}

DataOut Recovery::resend(uint64_t now_us, uint32_t path) {
  const uint32_t id = lost_.head;
  outstanding_.unlink(lost_, id);
  launch(now_us, path, id);
  return outstanding_[id].packet;
}

void Recovery::end_of_batch(uint64_t now_us, uint32_t packets) {
  if (!congestion_->paces()) {
    paced_until_us_ = 0;
    return;
  }
  const uint64_t gap_us = round_trip_.smoothed_us() * packets * PACING_PERCENT / 100 / window_;
  paced_until_us_ = gap_us < PACING_MIN_US ? 0 : now_us + gap_us;
}

bool Recovery::is_mark_due(const Path& path) const {
  return is_tail_ && lossy_packets_ != 0 && !path.in_flight.empty() && !path.is_bad() && !path.is_mark_open &&
         outstanding_[path.in_flight.tail].order > path.mark_order;
}

bool Recovery::take_tail_mark(uint32_t& index) {
  for (index = 0; index < paths_.count(); ++index) {
    Path& path = paths_[index];
    if (!is_mark_due(path)) continue;
    // Far enough behind all data to condemn it without a wait.
    path.mark_order = path.next_order + REORDER_PACKETS;
    path.next_order = path.mark_order + 1;
    path.mark_number = ++probe_number_;
    path.is_mark_open = true;
    return true;
  }
  return false;
}

bool Recovery::take_probe(uint64_t now_us, DataOut& out, uint32_t& path_index) {
  if (outstanding_.size() == 0) return false;
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    Path& path = paths_[index];
    if (!path.probe_due) continue;
    path.probe_due = false;
    if (path.in_flight.empty()) continue;
    const uint32_t id = path.in_flight.tail;
    // Elsewhere, if there is an elsewhere: this path may be dead, and the question is what arrived before.
    path_index = index;
    for (uint32_t other = 0; other < paths_.count(); ++other)
      if (other != index && paths_.offers(other, now_us)) {
        path_index = policy_->choose(now_us, paths_, index);
        break;
      }
    outstanding_.unlink(path.in_flight, id);
    --path.in_flight_packets;
    --in_flight_;
    launch(now_us, path_index, id);
    ++counters_.tail_probe_packets;
    out = outstanding_[id].packet;
    // A single packet at a time on a dead path is never silence of several: so twice is enough.
    if (path_index != index && path.in_flight.empty() && ++path.silences >= 2)
      make_rail_bad(now_us, index, path.last_sent_us);
    return true;
  }
  return false;
}

void Recovery::on_echo(uint64_t now_us, const Echo& echo, uint64_t control_waited_us) {
  if (echo.path >= paths_.count()) return;
  uint64_t fabric_us = 0;
  const uint32_t id = outstanding_.find(echo.immediate);
  // Karn's rule, RFC 6298 (3): a packet sent twice says nothing.
  if (id != NO_RECORD && outstanding_[id].transmissions == 1 && outstanding_[id].path == echo.path) {
    const uint64_t passed_us = now_us - outstanding_[id].sent_us;
    const uint64_t sample_us = passed_us > echo.delay_us ? passed_us - echo.delay_us : 0;
    paths_[echo.path].round_trip.add_sample(sample_us);
    round_trip_.add_sample(sample_us);
    counters_.rtt_us = round_trip_.smoothed_us();
    counters_.rto_us = round_trip_.rto_us();
    const uint64_t waited_us = echo.waited_us + control_waited_us;
    fabric_us = sample_us > waited_us ? sample_us - waited_us : 1;
  }
  Path& path = paths_[echo.path];
  if (path.is_mark_open && echo.immediate == (ECHO_PROBE | path.mark_number)) {
    path.is_mark_open = false;
    path.newest_acked_order = std::max(path.newest_acked_order, path.mark_order);
  }
  note_arrivals(now_us, echo, fabric_us);
}

void Recovery::on_acked(uint64_t now_us, uint32_t immediate) {
  const uint32_t id = outstanding_.find(immediate);
  if (id == NO_RECORD) return;
  const Record& record = outstanding_[id];
  Path& path = paths_[record.path];
  if (record.lost) {
    outstanding_.unlink(lost_, id);
  } else {
    outstanding_.unlink(path.in_flight, id);
    --path.in_flight_packets;
    --in_flight_;
    // A second transmission acknowledged sooner than a round trip takes: it is the first one that arrived
    // (RFC 8985, 6.2 step 2), so it says nothing about the path of the second.
    if (record.transmissions == 1 || now_us - record.sent_us >= round_trip(path).min_us()) {
      path.newest_acked_order = std::max(path.newest_acked_order, record.order);
      path.last_ack_us = now_us;
      path.probe_due = false;
      path.tail_probes = 0;
      path.is_mark_open &= path.newest_acked_order < path.mark_order;
      newest_acked_sent_us_ = std::max(newest_acked_sent_us_, record.sent_us);
      on_answer(now_us, path);
    }
  }
  unanswered_timeouts_ = 0;
  last_ack_us_ = now_us;
  outstanding_.erase(id);
}

void Recovery::end_of_acks(uint64_t now_us) {
  if (outstanding_.size() == 0) return;
  for (uint32_t index = 0; index < paths_.count(); ++index) detect_losses(now_us, index);
}

void Recovery::mark_lost(Path& path, uint32_t id) {
  outstanding_.unlink(path.in_flight, id);
  outstanding_.push_back(lost_, id);
  outstanding_[id].lost = true;
  --path.in_flight_packets;
  --in_flight_;
}

void Recovery::note_losses(uint64_t now_us, uint32_t index, uint32_t packets) {
  congestion_->on_losses(now_us, index, packets);
  lossy_packets_ = LOSSY_PACKETS;
  is_overflowing_ |= packets >= OVERFLOW_PACKETS;
}

void Recovery::detect_losses(uint64_t now_us, uint32_t index) {
  Path& path = paths_[index];
  uint32_t lost = 0;
  while (!path.in_flight.empty()) {
    const Record& oldest = outstanding_[path.in_flight.head];
    if (oldest.order >= path.newest_acked_order) break;
    const bool far_behind = path.newest_acked_order - oldest.order >= REORDER_PACKETS;
    if (!far_behind && now_us < oldest.sent_us + round_trip(path).reorder_deadline_us()) break;
    mark_lost(path, path.in_flight.head);
    ++lost;
  }
  if (lost != 0) note_losses(now_us, index, lost);
  if (!path.in_flight.empty()) detect_silence(now_us, index);
}

// What was sent on other paths a whole round trip of this one later is there.
void Recovery::detect_silence(uint64_t now_us, uint32_t index) {
  Path& path = paths_[index];
  const uint64_t silence_us = round_trip(path).silence_us();
  const uint64_t oldest_us = outstanding_[path.in_flight.head].sent_us;
  if (!round_trip_.sampled() || oldest_us + silence_us >= newest_acked_sent_us_) return;
  const bool is_alive = outstanding_[path.in_flight.head].order < path.newest_acked_order;
  uint32_t lost = 0;
  while (!path.in_flight.empty() && outstanding_[path.in_flight.head].sent_us + silence_us < newest_acked_sent_us_) {
    mark_lost(path, path.in_flight.head);
    ++lost;
  }
  // (Later ones of this path are there: then it is as alive as any.)
  if (is_alive) {
    note_losses(now_us, index, lost);
  } else if (lost >= SILENT_PACKETS || ++path.silences >= 2) {
    make_rail_bad(now_us, index, oldest_us);
  }
}

uint64_t Recovery::timeout_at_us(const Path& path) const {
  if (path.in_flight.empty()) return UINT64_MAX;
  // RFC 6298 (5.3): restarted by every acknowledgement of the path. Backed off only while the peer is silent on
  // all paths.
  const uint64_t since_us = std::max(outstanding_[path.in_flight.head].sent_us, path.last_ack_us);
  return since_us + backed_off_us(round_trip(path), std::min(path.timeouts, unanswered_timeouts_));
}

uint64_t Recovery::probe_at_us(const Path& path) const {
  const RoundTrip& round_trip = this->round_trip(path);
  if (path.in_flight.empty() || unanswered_timeouts_ != 0 || !round_trip.sampled()) return UINT64_MAX;
  // Again after twice the time (RFC 9002, 6.2): the first may be lost, or be acknowledged by the copy before it, which
  // says nothing of what else is on the path.
  const auto wait_us = [&](uint64_t ack_delay_us) {
    return std::min(round_trip.pto_us(ack_delay_us) << std::min(path.tail_probes, BACKOFF_MAX), RTO_MAX_US);
  };
  const uint64_t since_us = std::max({path.last_sent_us, path.last_ack_us, path.probed_us});
  const uint64_t delayed_us = since_us + wait_us(peer_ack_delay_us_);
  return is_tail_ ? std::min(delayed_us, std::max(since_us, tail_since_us_) + wait_us(0)) : delayed_us;
}

uint64_t Recovery::reorder_at_us(const Path& path) const {
  if (path.in_flight.empty()) return UINT64_MAX;
  const Record& oldest = outstanding_[path.in_flight.head];
  if (oldest.order >= path.newest_acked_order) return UINT64_MAX;
  return oldest.sent_us + round_trip(path).reorder_deadline_us();
}

uint64_t Recovery::next_timeout_us() const {
  if (outstanding_.size() == 0) return UINT64_MAX;
  uint64_t next_us = next_path_probe_us();
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    const Path& path = paths_[index];
    if (path.probe_due || is_mark_due(path)) return 0;
    next_us = std::min({next_us, timeout_at_us(path), probe_at_us(path), reorder_at_us(path)});
  }
  return next_us;
}

void Recovery::time_out(uint64_t now_us, uint32_t index) {
  make_bad(now_us, index);
  Path& path = paths_[index];
  path.timeouts = std::min(path.timeouts + 1, BACKOFF_MAX);
  path.until_us = now_us + backed_off_us(round_trip(path), path.timeouts);
  ++unanswered_timeouts_;
  ++counters_.local_ack_timeout_err;
}

void Recovery::on_timeout(uint64_t now_us) {
  if (outstanding_.size() == 0) return;
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    Path& path = paths_[index];
    detect_losses(now_us, index);
    if (timeout_at_us(path) <= now_us) {
      time_out(now_us, index);
    } else if (probe_at_us(path) <= now_us) {
      path.probe_due = true;
      path.probed_us = now_us;
      path.tail_probes = std::min(path.tail_probes + 1, BACKOFF_MAX);
    }
  }
}

void Recovery::clear() {
  outstanding_.clear();
  lost_ = RecordList{};
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    paths_[index].in_flight = RecordList{};
    paths_[index].in_flight_packets = 0;
    paths_[index].probe_due = false;
  }
  in_flight_ = 0;
}

}  // namespace sennit::flow
