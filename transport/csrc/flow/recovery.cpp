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
      paths_(config.path_count, config.seed) {}

uint32_t Recovery::allowance() const {
  const uint32_t window =
      unanswered_timeouts_ != 0 ? std::min(SILENT_WINDOW_PACKETS, window_packets_) : window_packets_;
  return window > in_flight_ ? window - in_flight_ : 0;
}

uint32_t Recovery::choose_path(uint64_t now_us) {
  return paths_.choose(now_us, lost_.empty() ? Paths::NONE : outstanding_[lost_.head].path);
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

bool Recovery::take_probe(uint64_t now_us, DataOut& out, uint32_t& path_index) {
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    Path& path = paths_[index];
    if (!path.probe_due) continue;
    path.probe_due = false;
    if (path.in_flight.empty()) continue;
    const uint32_t id = path.in_flight.tail;
    outstanding_.unlink(path.in_flight, id);
    --in_flight_;
    launch(now_us, index, id);
    ++counters_.tail_probe_packets;
    out = outstanding_[id].packet;
    path_index = index;
    return true;
  }
  return false;
}

void Recovery::on_echo(uint64_t now_us, uint32_t immediate, uint64_t delay_us) {
  const uint32_t id = outstanding_.find(immediate);
  if (id == NO_RECORD) return;
  const Record& record = outstanding_[id];
  // Karn's rule, RFC 6298 (3): a packet sent twice says nothing.
  if (record.transmissions != 1) return;
  const uint64_t passed_us = now_us - record.sent_us;
  const uint64_t sample_us = passed_us > delay_us ? passed_us - delay_us : 0;
  paths_[record.path].round_trip.add_sample(sample_us);
  round_trip_.add_sample(sample_us);
  counters_.rtt_us = round_trip_.smoothed_us();
  counters_.rto_us = round_trip_.rto_us();
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
    --in_flight_;
    // A second transmission acknowledged sooner than a round trip takes: it is the first one that arrived
    // (RFC 8985, 6.2 step 2), so it says nothing about the path of the second.
    if (record.transmissions == 1 || now_us - record.sent_us >= round_trip(path).min_us()) {
      path.newest_acked_order = std::max(path.newest_acked_order, record.order);
      path.last_ack_us = now_us;
      path.timeouts = 0;
      path.suspended_until_us = 0;
      path.probe_sent = path.probe_due = false;
    }
  }
  unanswered_timeouts_ = 0;
  last_ack_us_ = now_us;
  outstanding_.erase(id);
}

void Recovery::end_of_acks(uint64_t now_us) {
  for (uint32_t index = 0; index < paths_.count(); ++index) detect_losses(now_us, paths_[index]);
}

void Recovery::mark_lost(Path& path, uint32_t id) {
  outstanding_.unlink(path.in_flight, id);
  outstanding_.push_back(lost_, id);
  outstanding_[id].lost = true;
  --in_flight_;
}

void Recovery::detect_losses(uint64_t now_us, Path& path) {
  while (!path.in_flight.empty()) {
    const Record& oldest = outstanding_[path.in_flight.head];
    if (oldest.order >= path.newest_acked_order) return;
    const bool far_behind = path.newest_acked_order - oldest.order >= REORDER_PACKETS;
    if (!far_behind && now_us < oldest.sent_us + round_trip(path).reorder_deadline_us()) return;
    mark_lost(path, path.in_flight.head);
  }
}

uint64_t Recovery::timeout_at_us(const Path& path) const {
  if (path.in_flight.empty()) return UINT64_MAX;
  const RoundTrip& round_trip = this->round_trip(path);
  // RFC 6298 (5.3): restarted by every acknowledgement of the path.
  const uint64_t since_us = std::max(outstanding_[path.in_flight.head].sent_us, path.last_ack_us);
  if (paths_.count() > 1 && round_trip.sampled()) {
    // A peer that answers elsewhere is not slow, so this path is dead: no reason to wait for RTO_MIN_US. What
    // tries out a path known to be dead must not hold up its message for long either.
    const uint64_t probe_us = round_trip.pto_us(peer_ack_delay_us_);
    if (path.timeouts != 0 && unanswered_timeouts_ == 0) return since_us + probe_us;
    if (last_ack_us_ > since_us + probe_us) return since_us + 2 * probe_us;
  }
  // Backed off only while the peer is silent on all paths.
  return since_us + backed_off_us(round_trip, std::min(path.timeouts, unanswered_timeouts_));
}

uint64_t Recovery::probe_at_us(const Path& path) const {
  const RoundTrip& round_trip = this->round_trip(path);
  if (path.in_flight.empty() || path.probe_sent || path.timeouts != 0 || !round_trip.sampled()) return UINT64_MAX;
  return std::max(path.last_sent_us, path.last_ack_us) + round_trip.pto_us(peer_ack_delay_us_);
}

uint64_t Recovery::reorder_at_us(const Path& path) const {
  if (path.in_flight.empty()) return UINT64_MAX;
  const Record& oldest = outstanding_[path.in_flight.head];
  if (oldest.order >= path.newest_acked_order) return UINT64_MAX;
  return oldest.sent_us + round_trip(path).reorder_deadline_us();
}

uint64_t Recovery::next_timeout_us() const {
  uint64_t next_us = UINT64_MAX;
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    const Path& path = paths_[index];
    if (path.probe_due) return 0;
    next_us = std::min({next_us, timeout_at_us(path), probe_at_us(path), reorder_at_us(path)});
  }
  return next_us;
}

void Recovery::time_out(uint64_t now_us, Path& path) {
  while (!path.in_flight.empty()) mark_lost(path, path.in_flight.head);
  path.timeouts = std::min(path.timeouts + 1, BACKOFF_MAX);
  path.suspended_until_us = now_us + backed_off_us(round_trip(path), path.timeouts);
  path.probe_due = false;
  ++unanswered_timeouts_;
  ++counters_.local_ack_timeout_err;
}

void Recovery::on_timeout(uint64_t now_us) {
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    Path& path = paths_[index];
    detect_losses(now_us, path);
    if (timeout_at_us(path) <= now_us) {
      time_out(now_us, path);
    } else if (probe_at_us(path) <= now_us) {
      path.probe_due = path.probe_sent = true;
    }
  }
}

void Recovery::clear() {
  outstanding_.clear();
  lost_ = RecordList{};
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    paths_[index].in_flight = RecordList{};
    paths_[index].probe_due = false;
  }
  in_flight_ = 0;
}

}  // namespace sennit::flow
