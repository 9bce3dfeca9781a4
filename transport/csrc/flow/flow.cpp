// SPDX-License-Identifier: Apache-2.0
// The public calls of a flow: which of its parts an event concerns, and when it makes a control payload due.
#include "flow/flow.hpp"

#include <algorithm>
#include <array>

#include "flow/immediate.hpp"
#include "flow/mechanisms.hpp"
#include "flow/state.hpp"
#include "wire/utf8.hpp"

namespace sennit::flow {

Flow::Flow(const FlowConfig& config, std::span<std::byte> eager_memory, uint32_t eager_rkey)
    : state_(std::make_unique<State>(config, eager_memory, eager_rkey)) {}
Flow::~Flow() = default;

void Flow::set_remote_eager(uint64_t address, uint32_t rkey) { state_->eager_sender.set_remote(address, rkey); }

uint64_t Flow::eager_max_bytes() const { return state_->eager_sender.max_bytes(); }

bool Flow::send_eager(const MessageHeader& header, uint32_t flags, const void* data, uint64_t now_us) {
  State& state = *state_;
  state.wake();
  if (state.peer_closed) state.lose_peer("said goodbye before this message");
  if (state.dead) return false;
  if (state.eager_sender.push(header, flags, data)) return true;
  if (state.ask_at_us == NEVER) state.ask_at_us = now_us + state.recovery.round_trip().rto_us();
  return false;
}

void Flow::advertise(uint64_t receive_id, const MessageHeader& header, std::byte* destination, const Keys& keys,
                     uint64_t now_us) {
  State& state = *state_;
  state.wake();
  if (state.peer_closed) state.lose_peer("said goodbye before this message");
  if (state.dead) return;
  state.receiver.advertise(receive_id, header, destination, keys);
  state.grants.on_advertised(state.receiver.opened_packets());
  if (state.receiver.has_unsent_adverts() || state.receiver.is_short()) state.request_control(now_us);
}

void Flow::ask(uint64_t receive_id, uint64_t now_us) {
  State& state = *state_;
  state.wake();
  state.receiver.ask(receive_id);
  if (state.receiver.is_short()) state.request_control(now_us);
}

void Flow::transfer(uint64_t send_id, uint64_t advert_id, const std::byte* data, uint64_t size_bytes) {
  State& state = *state_;
  state.wake();
  if (state.peer_closed) state.lose_peer("said goodbye before this message");
  if (state.dead) return;
  const char* error = state.sender.transfer(send_id, advert_id, data, size_bytes);
  if (error != nullptr) state.lose_peer(error);
}

bool Flow::give_back(Event& out) {
  State& state = *state_;
  if (state.dead || !state.is_peer_short || !state.sender.give_back(out)) return false;
  state.wake();
  return true;
}

bool Flow::has_event() const {
  const State& state = *state_;
  return state.lost_pending || (!state.dead && (!state.events.empty() || state.eager_receiver.has_undelivered()));
}

bool Flow::poll_event(Event& out) {
  State& state = *state_;
  if (state.dead && !state.lost_pending) return false;
  if (!state.eager_deferred) state.eager_receiver.consume();
  // A quarter of the ring at a time, so that the peer's window never closes while we keep up.
  if (state.eager_receiver.consumed_below() - state.consumed_told >= state.config.eager_slot_count / 4 && !state.dead)
    state.request_control(0);
  if (!state.events.empty()) {
    out = state.events.front();
    state.events.pop();
    return true;
  }
  if (!state.eager_deferred) {
    switch (state.eager_receiver.take(out)) {
      case EagerReceiver::Taken::message:
        return true;
      case EagerReceiver::Taken::malformed:
        state.lose_peer("sent a malformed eager message");
        break;
      case EagerReceiver::Taken::none:
        break;
    }
  }
  state.eager_deferred = false;
  if (!state.lost_pending) return false;
  state.lost_pending = false;
  const auto kind = state.peer_aborted ? Event::Kind::peer_aborted : Event::Kind::peer_lost;
  out = Event{kind, {}, 0, 0, nullptr, 0, state.reason.c_str()};
  return true;
}

void Flow::defer_eager() {
  state_->eager_receiver.defer();
  state_->eager_deferred = true;
}

size_t Flow::poll_data(uint64_t now_us, std::span<DataOut> out, uint32_t& path) {
  State& state = *state_;
  Recovery& recovery = state.recovery;
  if (state.dead || out.empty()) return 0;
  if (recovery.take_probe(now_us, out[0], path)) {
    state.choose_key(path, out[0]);
    return 1;
  }
  if (!state.can_send()) {
    recovery.set_tail(now_us, state.is_tail());
    if (!state.credit_stalled && recovery.allowance() != 0 && state.sender.is_out_of_grant()) {
      state.credit_stalled = true;
      ++state.counters.credit_stalls;
      trace::credit_stall_begin(state.config.ends, state.sender.granted_packets());
    }
    return 0;
  }
  if (recovery.paced_until_us() > now_us) return 0;
  path = recovery.choose_path(now_us);
  const size_t limit = recovery.is_suspect(path) ? 1 : out.size();
  size_t count = 0;
  while (count < limit && state.can_send()) {
    DataOut& packet = out[count++];
    if (recovery.has_lost()) {
      packet = recovery.resend(now_us, path);
    } else {
      packet = state.eager_sender.has_unsent() ? state.eager_sender.take_unsent() : state.sender.take_unsent();
      recovery.on_sent(now_us, path, packet);
    }
    state.choose_key(path, packet);
    if (packet.size_bytes != state.config.payload_max_bytes) break;
  }
  recovery.end_of_batch(now_us, static_cast<uint32_t>(count));
  recovery.set_tail(now_us, state.is_tail());
  return count;
}

size_t Flow::poll_control(uint64_t now_us, std::span<std::byte> out, uint32_t& path) {
  State& state = *state_;
  size_t size_bytes = 0;
  if (!state.dead && (state.recovery.take_tail_mark(now_us, path) || state.recovery.take_path_probe(now_us, path))) {
    ++state.counters.control_packets_sent;
    return state.write_probe(now_us, out);
  }
  if (!state.dead && state.life_probes != 0) {
    --state.life_probes;
    path = state.life_path++ % state.config.path_count;
    state.recovery.begin_probe();
    ++state.counters.control_packets_sent;
    return state.write_probe(now_us, out);
  }
  if (!state.dead && state.control_due_us <= now_us) {
    // This must come before the echoes are taken.
    path = state.control_path(now_us);
    size_bytes = state.write_control(now_us, out);
  } else if (state.dead && state.last_words != 0) {
    --state.last_words;
    path = state.recovery.choose_path(now_us);
    size_bytes = state.write_last_word(out);
  }
  if (size_bytes == 0) return 0;
  ++state.counters.control_packets_sent;
  return size_bytes;
}

Verdict Flow::locate(uint32_t immediate, uint64_t address, uint32_t rkey, uint32_t size_bytes, Placement& out) const {
  State& state = *state_;
  out = Placement{};
  Verdict verdict = Verdict::bad_slot;
  if (!state.dead) {
    verdict = slot_of(immediate) == EAGER_SLOT
                  ? state.eager_receiver.locate(index_of(immediate), address, rkey, size_bytes, out)
                  : state.receiver.locate(immediate, address, rkey, size_bytes, out);
  }
  state.count_refusal(verdict);
  return verdict;
}

size_t Flow::predict(std::span<Placement> out) const { return state_->dead ? 0 : state_->receiver.predict(out); }

size_t Flow::predict_from(uint32_t immediate, std::span<Placement> out) const {
  return state_->dead ? 0 : state_->receiver.predict_from(immediate, out);
}

void Flow::on_data(uint64_t now_us, uint32_t path, uint32_t immediate, uint32_t size_bytes, bool ecn_marked,
                   uint64_t waited_us) {
  State& state = *state_;
  state.wake();
  if (state.dead) return state.repeat_last_word(now_us);
  const bool eager = slot_of(immediate) == EAGER_SLOT;
  const Verdict verdict = eager ? state.eager_receiver.classify_placed(index_of(immediate), size_bytes)
                                : state.receiver.classify(immediate, size_bytes);
  if (verdict != Verdict::place && verdict != Verdict::duplicate) return state.count_refusal(verdict);
  const bool is_duplicate = verdict == Verdict::duplicate;
  trace::packet_received(state.config.ends, path, immediate, size_bytes, is_duplicate);
  state.silence.on_heard(now_us);
  state.silence.on_data();
  state.note_arrival(now_us, path, immediate, ecn_marked, waited_us);
  if (is_duplicate) {
    ++state.counters.duplicate_packets;
    state.repeats_itself = true;
    if (!eager) state.receiver.on_duplicate(immediate);
    state.request_control(now_us + state.ack_pacing.hurried_us());
    return;
  }
  state.answered_since_data = false;
  ++state.counters.data_packets_received;
  state.counters.data_bytes_received += size_bytes;
  state.repeats = 0;
  state.repeat_at_us = NEVER;
  bool in_order, message_complete = false, ends_short = false;
  if (eager) {
    in_order = state.eager_receiver.on_data(index_of(immediate), size_bytes);
  } else {
    const Receiver::Arrival arrival = state.receiver.on_data(immediate, size_bytes, state.events);
    state.advert_retries = 0;  // data also answers adverts
    state.grants.on_arrival(now_us, ecn_marked);
    state.grants.on_advertised(state.receiver.opened_packets());
    in_order = arrival.in_order;
    message_complete = arrival.message_complete;
    ends_short = arrival.is_last_packet && !message_complete;
  }
  if (!in_order) ++state.counters.out_of_sequence;
  const uint64_t wait_us = state.ack_pacing.wait_us({path, in_order, message_complete, ends_short});
  state.request_control(state.grants.is_due() ? now_us : now_us + wait_us);
}

void Flow::on_control(uint64_t now_us, uint32_t path, std::span<const std::byte> payload, uint64_t waited_us) {
  State& state = *state_;
  state.wake();
  ++state.counters.control_packets_received;
  ControlReader control;
  if (!control.parse(payload)) {
    ++state.counters.bad_control;
    return;
  }
  const bool aborts = (control.header().flags & CONTROL_ABORT) != 0;
  if (state.dead) {
    // Two dead sides must not answer each other.
    if (!aborts && (control.header().flags & CONTROL_GOODBYE) == 0) state.repeat_last_word(now_us);
    return;
  }
  if (aborts) {
    state.peer_aborted = true;
    return state.lose_peer(repaired_utf8(control.reason()));
  }
  if (!state.eager_sender.check(control.header()) || !state.receiver.check_seen(control.header()) ||
      !state.sender.check(control)) {
    ++state.counters.bad_control;
    return;
  }
  if ((control.header().flags & CONTROL_PROBE) != 0) {
    state.note_arrival(now_us, path, ECHO_PROBE | control.header().probe_number, false, 0);
    // The sender takes what this answer does not acknowledge as lost, and it may not have read the answers before.
    if (uses(Mechanism::report_all)) state.receiver.report_all();
    state.is_asked = true;
    state.request_control(now_us);
  }
  state.apply_control(now_us, waited_us, control);
  trace::sack_received(state.config.ends, path, state.counters.rtt_us, state.recovery.outstanding());
}

uint64_t Flow::next_timeout_us() const {
  const State& state = *state_;
  if (state.dead) return state.last_words != 0 ? 0 : NEVER;
  if (state.life_probes != 0) return 0;
  const uint64_t send_at_us = state.can_send() ? state.recovery.paced_until_us() : NEVER;
  if (send_at_us == 0) return 0;
  return std::min({send_at_us, state.control_due_us, state.repeat_at_us, state.recovery.next_timeout_us(),
                   state.advert_retry_us(), state.ask_at_us, state.look_at_us()});
}

void Flow::on_timeout(uint64_t now_us) {
  State& state = *state_;
  if (state.dead) return;
  if (state.look_at_us() <= now_us) {
    state.look_for_life(now_us);
    if (state.dead) return;
  }
  state.recovery.on_timeout(now_us);
  if (state.advert_retry_us() <= now_us) {
    state.receiver.resend_adverts();
    state.advert_retries = std::min(state.advert_retries + 1, ADVERT_BACKOFF_MAX);
    state.repeats_itself = true;
    state.request_control(now_us);
  }
  if (state.repeat_at_us <= now_us) {
    state.repeat_at_us = NEVER;
    ++state.repeats;
    state.request_control(now_us);
  }
  if (state.ask_at_us <= now_us) {
    if (state.eager_sender.is_waiting()) {
      state.ask |= state.eager_sender.all_received();
      state.asks = std::min(state.asks + 1, BACKOFF_MAX);
      state.ask_at_us = now_us + std::min(state.recovery.round_trip().rto_us() << state.asks, RTO_MAX_US);
      state.repeats_itself |= state.ask;
      if (state.ask) state.request_control(now_us);
    } else {
      state.ask_at_us = NEVER;
      state.asks = 0;
    }
  }
}

void Flow::expect(uint64_t now_us) {
  State& state = *state_;
  state.wake();
  if (state.dead) return;
  if (state.peer_closed && !state.eager_receiver.has_undelivered() && state.events.empty()) {
    // Not at once: packets that the peer sent before its goodbye may have taken a slower path.
    if (state.is_goodbye_old) return state.lose_peer("left the group");
    state.is_goodbye_old = true;
  }
  state.look_for_life(now_us);
}

void Flow::on_heard(uint64_t now_us) {
  state_->wake();
  state_->silence.on_heard(now_us);
}

void Flow::on_path_failed(uint64_t now_us, uint32_t path) {
  State& state = *state_;
  state.wake();
  if (!state.dead && path < state.config.path_count) state.recovery.on_path_failed(now_us, path);
}

void Flow::on_peer_failed(std::string_view reason) {
  State& state = *state_;
  state.wake();
  if (state.peer_closed && !state.has_outstanding()) return;
  state.lose_peer(reason);
}

uint64_t Flow::last_heard_us() const { return state_->silence.heard_us(); }

uint64_t Flow::silent_us() const { return state_->silence.silent_us(); }

bool Flow::ended() const { return state_->dead; }

std::string_view Flow::end_reason() const { return state_->reason; }

bool Flow::idle() const { return state_->dead || state_->idle(); }

void Flow::revoke() noexcept {
  State& state = *state_;
  state.forget();
  state.events.clear();
  state.lost_pending = false;
  // A goodbye is not repeated, because the state of arrived messages is gone.
  if (state.closing) state.last_words = 0;
}

void Flow::abort(std::string_view reason) {
  State& state = *state_;
  state.wake();
  const bool was_dead = state.dead;
  revoke();
  if (was_dead) return;
  state.reason = reason;
  // A peer that said goodbye wants to hear no more. If it goes on nevertheless, it gets the reason as an answer.
  if (!state.peer_closed) state.last_words = LAST_WORD_COPIES;
}

void Flow::close() {
  State& state = *state_;
  state.wake();
  if (state.dead || state.closing) return;
  state.closing = true;
  state.last_words = LAST_WORD_COPIES;
  state.request_control(0);
}

const FlowCounters& Flow::counters() const { return state_->counters; }

std::string Flow::describe() const {
  const State& state = *state_;
  const Paths& paths = state.recovery.paths();
  std::array<uint32_t, 4> in_state{};
  for (uint32_t index = 0; index < paths.count(); ++index) ++in_state[static_cast<size_t>(paths[index].state)];
  const auto count = [&](PathState path_state) { return std::to_string(in_state[static_cast<size_t>(path_state)]); };
  // A path is good until there is evidence against it. If nothing ever came, that is no news.
  const std::string path_states = state.silence.heard_us() == 0
                                      ? "never heard from"
                                      : count(PathState::good) + " good, " + count(PathState::skip) + " skip, " +
                                            count(PathState::bad) + " bad, " + count(PathState::probing) + " probing";
  const std::string round_trip = state.recovery.round_trip().sampled()
                                     ? "rtt " + std::to_string(state.counters.rtt_us) + " us"
                                     : "no round trip measured yet";
  return std::to_string(paths.count()) + (paths.count() == 1 ? " path (" : " paths (") + path_states + "; " +
         std::string(state.recovery.policy().name()) + "), window " + std::to_string(state.counters.window_packets) +
         " packets (" + std::string(state.recovery.congestion().name()) + "), " + round_trip + ", " +
         std::to_string(state.recovery.outstanding()) + " packets unacknowledged, " +
         std::to_string(state.sender.open_transfers()) + " transfers and " +
         std::to_string(state.receiver.open_credits()) + " credits open, " +
         std::to_string(state.counters.retransmitted_packets) + " retransmitted, " +
         std::to_string(state.counters.local_ack_timeout_err) + " timeouts";
}

}  // namespace sennit::flow
