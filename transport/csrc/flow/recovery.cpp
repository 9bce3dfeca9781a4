// SPDX-License-Identifier: Apache-2.0
#include "flow/recovery.hpp"

#include <algorithm>

#include "flow/mechanisms.hpp"
#include "telemetry/counter_page.hpp"

namespace sennit::flow {
namespace {

constexpr uint32_t WINDOW_MIN_PACKETS = 8;
// The pause between probes doubles at most this often. RTO_MAX_US limits it, too.
constexpr uint32_t BACKOFF_MAX = 10;
// If this many packets in a row are all lost, it is no accident, even at a loss of one packet in five.
constexpr uint32_t SILENT_PACKETS = 4;
// If this many are lost at a time on a path that still answers, a queue overflowed.
constexpr uint32_t OVERFLOW_PACKETS = 8;
// After a loss, this many packets are suspect.
constexpr uint32_t LOSSY_PACKETS = 65'536;
// Before the first sample: longer than most round-trip times, and what our own packets take at 500 MB/s.
constexpr uint64_t PTO_INITIAL_US = 1'000;
constexpr uint64_t INITIAL_PACKET_US = 8;
// Sent ahead of the pace, so that a late timer costs nothing.
constexpr uint64_t PACING_PERCENT = 80;
// Shorter pauses are not worth it, because sending a batch takes longer.
constexpr uint64_t PACING_MIN_US = 5;

uint32_t window_packets(const FlowConfig& config) {
  return std::max(config.window_bytes / config.payload_max_bytes, WINDOW_MIN_PACKETS);
}

}  // namespace

// Lost packets hold their record until they are acknowledged, so there is room for more than the window.
Recovery::Recovery(const FlowConfig& config, FlowCounters& counters)
    : ends_(config.ends),
      window_packets_(window_packets(config)),
      peer_ack_delay_us_(config.ack_delay_us),
      counters_(counters),
      outstanding_(window_packets_ * 2),
      paths_(config.path_count, config.rail_count),
      policy_(make_path_policy(config.path_policy, config.path_count, config.seed)),
      congestion_(
          make_congestion_control(config.congestion, {window_packets_, config.path_count, config.target_queue_us})) {
  if (config.counter_page == nullptr) own_path_counters_.resize(config.path_count);
  for (uint32_t path = 0; path < config.path_count; ++path)
    path_counters_.push_back(config.counter_page != nullptr
                                 ? &config.counter_page->place<PathCounters>(config.ends.peer, path)
                                 : &own_path_counters_[path]);
  note_window();
}

void Recovery::note_window() {
  counters_.window_packets = window_ = congestion_->window_packets();
  // Half of the window: two paths carry all of it, and a dead path stops no more than half.
  if (paths_.count() > 2 && uses(Mechanism::path_limit)) paths_.set_in_flight_limit(std::max(window_ / 2, 1u));
}

uint32_t Recovery::choose_path(uint64_t now_us) {
  for (uint32_t index = 0; index < paths_.count(); ++index)
    if (paths_.offers(index, now_us))
      return policy_->choose(
          now_us, paths_, lost_.empty() || !uses(Mechanism::other_path) ? Paths::NONE : outstanding_[lost_.head].path);
  const uint32_t path = paths_.least_bad();
  // All paths are bad, so each gets its turn.
  if (paths_[path].is_bad()) paths_[path].until_us = std::max(paths_[path].until_us, now_us) + 1;
  return path;
}

void Recovery::launch(uint64_t now_us, uint32_t path_index, uint32_t id) {
  Path& path = paths_[path_index];
  PacketRecord& record = outstanding_[id];
  const uint32_t path_before = record.path;
  outstanding_.push_back(path.in_flight, id);
  record.sent_us = last_sent_us_ = now_us;
  record.order = path.next_order++;
  record.serial = next_serial_++;
  record.path = record.moved_from = static_cast<uint16_t>(path_index);
  record.lost = false;
  if (record.transmissions < UINT8_MAX) ++record.transmissions;
  if (lossy_packets_ != 0) --lossy_packets_;
  ++path.in_flight_packets;
  ++in_flight_;
  ++counters_.data_packets_sent;
  ++path_counters_[path_index]->data_packets_sent;
  counters_.data_bytes_sent += record.packet.size_bytes;
  trace::packet_sent(ends_, path_index, record.packet.immediate, record.packet.size_bytes, record.transmissions);
  if (record.transmissions == 1) return;
  ++counters_.retransmitted_packets;
  ++path_counters_[path_index]->retransmitted_packets;
  trace::retransmit(ends_, path_index, path_before, record.packet.immediate, record.transmissions);
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
  return !path.in_flight.empty() && !path.is_bad() && !path.is_mark_open &&
         outstanding_[path.in_flight.tail].order > path.mark_order;
}

void Recovery::want_mark(uint32_t path) { paths_[path].is_mark_wanted = is_mark_wanted_ = true; }

bool Recovery::take_tail_mark(uint64_t now_us, uint32_t& index) {
  if (outstanding_.size() == 0 || (!is_mark_wanted_ && !marks_tail())) return false;
  for (index = 0; index < paths_.count(); ++index) {
    Path& path = paths_[index];
    if (!path.is_mark_wanted && !(marks_tail() && is_mark_due(path))) continue;
    path.is_mark_wanted = false;
    path.mark_order = path.next_order++;
    path.mark = {next_serial_++, now_us};
    path.mark_number = ++probe_number_;
    path.is_mark_open = true;
    last_sent_us_ = now_us;
    return true;
  }
  is_mark_wanted_ = false;
  return false;
}

// Prefers another path, because the packet's own path may be dead.
uint32_t Recovery::probe_path(uint64_t now_us, uint32_t from, bool is_moved) {
  if (unanswered_probes_ == 0) {
    // The packet was moved before, and something arrived since: take the path where that arrived.
    if (is_moved && arrived_.serial != 0 && arrived_path_ != from) return arrived_path_;
    for (uint32_t other = 0; other < paths_.count(); ++other)
      if (other != from && paths_.offers(other, now_us)) return policy_->choose(now_us, paths_, from);
  }
  // Each path in turn, whatever its state or load.
  probe_turn_ = (probe_turn_ + 1) % paths_.count();
  if (probe_turn_ == from) probe_turn_ = (probe_turn_ + 1) % paths_.count();
  return probe_turn_;
}

bool Recovery::take_probe(uint64_t now_us, DataOut& out, uint32_t& path_index) {
  if (!is_probe_due_) return false;
  is_probe_due_ = false;
  uint32_t id = NO_RECORD;
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    const uint32_t head = paths_[index].in_flight.head;
    if (head != NO_RECORD && (id == NO_RECORD || outstanding_[head].serial < outstanding_[id].serial)) id = head;
  }
  if (id == NO_RECORD) return false;
  const uint32_t from = outstanding_[id].path;
  path_index = probe_path(now_us, from, outstanding_[id].transmissions > 1);
  unlink_in_flight(paths_[from], id);
  launch(now_us, path_index, id);
  outstanding_[id].moved_from = static_cast<uint16_t>(from);
  out = outstanding_[id].packet;
  ++counters_.tail_probe_packets;
  trace::probe_timeout(ends_, path_index, unanswered_probes_, counters_.rto_us);
  if (uses(Mechanism::probe_mark)) want_mark(path_index);
  // Nobody answered the last probe, so this path may be dead. Each rail gets a mark, every time on another path.
  if (unanswered_probes_ != 0) {
    ++counters_.local_ack_timeout_err;
    const uint32_t rails = paths_.rail_count();
    for (uint32_t rail = 0; rail < rails; ++rail)
      if (rail != paths_.rail_of(path_index) && uses(Mechanism::rail_marks))
        want_mark((rail + unanswered_probes_ * rails) % (paths_.count() / rails * rails));
  }
  unanswered_probes_ = std::min(unanswered_probes_ + 1, BACKOFF_MAX);
  return true;
}

void Recovery::on_echo(uint64_t now_us, const Echo& echo, uint64_t control_waited_us) {
  if (echo.path >= paths_.count()) return;
  uint64_t fabric_us = 0;
  Path& path = paths_[echo.path];
  const uint32_t id = outstanding_.find(echo.immediate);
  // Karn's rule, RFC 6298 (3): a packet that was sent twice gives no sample.
  if (id != NO_RECORD && outstanding_[id].transmissions == 1 && outstanding_[id].path == echo.path) {
    const uint64_t passed_us = now_us - outstanding_[id].sent_us;
    const uint64_t sample_us = passed_us > echo.delay_us ? passed_us - echo.delay_us : 0;
    path.round_trip.add_sample(sample_us);
    trace::rtt_sample(ends_, echo.path, sample_us);
    path_counters_[echo.path]->rtt_us = path.round_trip.smoothed_us();
    round_trip_.add_sample(sample_us);
    counters_.rtt_us = round_trip_.smoothed_us();
    counters_.rto_us = round_trip_.rto_us();
    const uint64_t waited_us = echo.waited_us + control_waited_us;
    // The kernel's timestamps use a clock that may be set back or forward.
    if (sample_us > waited_us) {
      fabric_us = sample_us - waited_us;
      path.fabric_round_trip.add_sample(fabric_us);
      fabric_round_trip_.add_sample(fabric_us);
    }
  }
  if (path.is_mark_open && echo.immediate == (ECHO_PROBE | path.mark_number)) {
    path.is_mark_open = false;
    path.newest_acked_order = std::max(path.newest_acked_order, path.mark_order);
    path.mark_answered_below = path.mark_order;
    note_arrived(echo.path, path.mark);
    last_heard_us_ = now_us;
    unanswered_probes_ = 0;
  }
  note_arrivals(now_us, echo, fabric_us);
}

void Recovery::note_arrived(uint32_t index, const Transmission& transmission) {
  Rail& rail = paths_.rail(index);
  rail.reported_serial = next_serial_;
  if (transmission.serial > rail.arrived.serial) rail.arrived = transmission;
  if (transmission.serial <= arrived_.serial) return;
  arrived_ = transmission;
  arrived_path_ = index;
}

void Recovery::on_acked(uint64_t now_us, uint32_t immediate) {
  const uint32_t id = outstanding_.find(immediate);
  if (id == NO_RECORD) return;
  const PacketRecord& record = outstanding_[id];
  Path& path = paths_[record.path];
  if (record.lost) {
    outstanding_.unlink(lost_, id);
  } else {
    unlink_in_flight(path, id);
    if (record.transmissions == 1) {
      path.newest_acked_order = std::max(path.newest_acked_order, record.order);
      path.is_mark_open &= path.newest_acked_order < path.mark_order;
      note_arrived(record.path, {record.serial, record.sent_us});
      on_answer(now_us, path);
    } else if (record.moved_from != record.path) {
      paths_[record.moved_from].question = record.serial;
    }
  }
  unanswered_probes_ = 0;
  last_heard_us_ = now_us;
  outstanding_.erase(id);
}

void Recovery::end_of_acks(uint64_t now_us) {
  if (arrived_.serial >= round_begin_) {
    heard_below_ = previous_begin_;
    previous_begin_ = round_begin_;
    round_begin_ = next_serial_;
  }
  const bool is_idle = outstanding_.size() == 0;
  if (is_idle) is_probe_due_ = is_mark_wanted_ = false;
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    Path& path = paths_[index];
    // A dead path that carries one packet at a time never shows several silent packets. So two silences are enough.
    // (Any answer ends the question.)
    if (uses(Mechanism::question) && path.question != 0 && path.question < heard_below_) {
      if (++path.silences >= 2) make_rail_bad(now_us, index, path.question);
      path.question = 0;
    }
    if (is_idle) path.is_mark_wanted = false;
    detect_losses(now_us, index, false);
    path.is_doubted =
        uses(Mechanism::doubt) && is_overtaken(path) && outstanding_[path.in_flight.head].serial < previous_begin_;
  }
}

void Recovery::unlink_in_flight(Path& path, uint32_t id) {
  outstanding_.unlink(path.in_flight, id);
  --path.in_flight_packets;
  --in_flight_;
}

void Recovery::mark_lost(Path& path, uint32_t id) {
  unlink_in_flight(path, id);
  outstanding_.push_back(lost_, id);
  PacketRecord& record = outstanding_[id];
  record.lost = true;
  ++path_counters_[record.path]->lost_packets;
  trace::packet_lost(ends_, record.path, record.packet.immediate, record.sent_us);
}

void Recovery::note_losses(uint64_t now_us, uint32_t index, uint32_t packets) {
  congestion_->on_losses(now_us, index, packets);
  lossy_packets_ = LOSSY_PACKETS;
  is_overflowing_ |= packets >= OVERFLOW_PACKETS;
}

void Recovery::detect_losses(uint64_t now_us, uint32_t index, bool has_read_all) {
  Path& path = paths_[index];
  uint32_t lost = 0;
  while (!path.in_flight.empty()) {
    const PacketRecord& oldest = outstanding_[path.in_flight.head];
    if (oldest.order >= path.newest_acked_order) break;
    // By time alone (RFC 8985, 6.2): a path that reorders delivers three later packets first, and more. After a pause
    // the window has passed for everything, and the answer may be in a socket that was not read yet.
    if (oldest.order >= path.mark_answered_below && (!has_read_all || now_us < reorder_at_us(path))) break;
    mark_lost(path, path.in_flight.head);
    ++lost;
  }
  if (lost != 0) note_losses(now_us, index, lost);
  if (!path.in_flight.empty()) detect_silence(now_us, index);
}

// Whether another path has delivered a packet that was sent one round-trip time of this path later.
bool Recovery::is_overtaken(const Path& path) const {
  return !path.in_flight.empty() && fabric_round_trip_.sampled() &&
         outstanding_[path.in_flight.head].sent_us + silence_us(path) < arrived_.sent_us;
}

bool Recovery::is_silent(uint32_t index, const PacketRecord& record) const {
  const uint64_t patience_us = silence_us(paths_[index]);
  const Rail& rail = paths_.rail(index);
  if (record.sent_us + patience_us < rail.arrived.sent_us) return true;
  // One packet of another rail proves nothing: the peer reads its sockets in turn, and may have stopped between the
  // two. A round later it has also read this rail's socket, and would have found a packet there.
  return record.serial < heard_below_ && rail.reported_serial <= heard_below_ &&
         record.sent_us + patience_us < arrived_.sent_us;
}

void Recovery::detect_silence(uint64_t now_us, uint32_t index) {
  Path& path = paths_[index];
  if (!uses(Mechanism::silence) || !is_overtaken(path) || !is_silent(index, outstanding_[path.in_flight.head])) return;
  const uint64_t oldest = outstanding_[path.in_flight.head].serial;
  const bool is_alive = outstanding_[path.in_flight.head].order < path.newest_acked_order;
  uint32_t lost = 0;
  while (!path.in_flight.empty() && is_silent(index, outstanding_[path.in_flight.head])) {
    mark_lost(path, path.in_flight.head);
    ++lost;
  }
  // Later packets of this path arrived, so the path is alive.
  if (is_alive) {
    note_losses(now_us, index, lost);
  } else if (lost >= SILENT_PACKETS || ++path.silences >= 2) {
    make_rail_bad(now_us, index, oldest);
  }
}

uint64_t Recovery::probe_at_us() const {
  if (in_flight_ == 0 || !uses(Mechanism::tail_probe)) return UINT64_MAX;
  const auto wait_us = [&](uint64_t ack_delay_us) {
    const uint64_t pto_us =
        round_trip_.sampled() ? round_trip_.pto_us(ack_delay_us) : PTO_INITIAL_US + in_flight_ * INITIAL_PACKET_US;
    return std::min(pto_us << unanswered_probes_, RTO_MAX_US);
  };
  const uint64_t since_us = std::max(last_sent_us_, last_heard_us_);
  const uint64_t delayed_us = since_us + wait_us(peer_ack_delay_us_);
  return is_tail_ && uses(Mechanism::tail_timer) ? std::min(delayed_us, std::max(since_us, tail_since_us_) + wait_us(0))
                                                 : delayed_us;
}

// A verdict needs a later packet, and none is in flight.
uint64_t Recovery::confirm_at_us() const {
  if (!uses(Mechanism::confirm_marks) || next_serial_ != round_begin_ || !fabric_round_trip_.sampled())
    return UINT64_MAX;
  uint64_t at_us = UINT64_MAX;
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    const Path& path = paths_[index];
    if (path.in_flight.empty()) continue;
    const PacketRecord& oldest = outstanding_[path.in_flight.head];
    if (oldest.serial < arrived_.serial) at_us = std::min(at_us, oldest.sent_us + silence_us(path));
  }
  return at_us;
}

uint64_t Recovery::reorder_at_us(const Path& path) const {
  if (path.in_flight.empty()) return UINT64_MAX;
  const PacketRecord& oldest = outstanding_[path.in_flight.head];
  if (oldest.order >= path.newest_acked_order || !uses(Mechanism::order_time)) return UINT64_MAX;
  return oldest.sent_us + round_trip(path).reorder_deadline_us();
}

uint64_t Recovery::next_timeout_us() const {
  if (outstanding_.size() == 0) return UINT64_MAX;
  if (is_probe_due_ || is_mark_wanted_) return 0;
  uint64_t next_us = std::min({next_path_probe_us(), probe_at_us(), confirm_at_us()});
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    const Path& path = paths_[index];
    if (marks_tail() && is_mark_due(path)) return 0;
    next_us = std::min(next_us, reorder_at_us(path));
  }
  return next_us;
}

void Recovery::on_timeout(uint64_t now_us) {
  if (outstanding_.size() == 0) return;
  for (uint32_t index = 0; index < paths_.count(); ++index) detect_losses(now_us, index, true);
  if (probe_at_us() <= now_us) {
    is_probe_due_ = true;
  } else if (confirm_at_us() <= now_us) {
    want_mark(arrived_path_);
    for (uint32_t index = 0; index < paths_.count(); ++index) {
      const Path& path = paths_[index];
      if (!path.in_flight.empty() && !path.is_mark_open && outstanding_[path.in_flight.head].serial < arrived_.serial)
        want_mark(index);
    }
  }
}

void Recovery::clear() {
  outstanding_.clear();
  lost_ = RecordList{};
  for (uint32_t index = 0; index < paths_.count(); ++index) {
    paths_[index].in_flight = RecordList{};
    paths_[index].in_flight_packets = 0;
    paths_[index].is_mark_wanted = paths_[index].is_doubted = false;
  }
  in_flight_ = 0;
  is_probe_due_ = is_mark_wanted_ = false;
}

// How paths become bad, what this says about their rail, and how they come back.

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
