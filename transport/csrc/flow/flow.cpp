// SPDX-License-Identifier: Apache-2.0
// Glue: which part of the flow an event concerns, when a control payload is due, when the peer is lost.
#include "flow/flow.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <stdexcept>

#include "flow/control.hpp"
#include "flow/eager.hpp"
#include "flow/immediate.hpp"
#include "flow/receiver.hpp"
#include "flow/recovery.hpp"
#include "flow/sender.hpp"
#include "flow/sequence_ring.hpp"

namespace sennit::flow {
namespace {

constexpr uint64_t NEVER = UINT64_MAX;
// Out of order or repeated data is acknowledged sooner than the rest, by this factor; not at once, since
// packets of several paths are out of order all the time.
constexpr uint64_t HURRY = 16;
// Goodbye and abort are not acknowledged; three copies get through where one may not.
constexpr uint32_t LAST_WORD_COPIES = 3;
// A control packet must not be larger than a data packet, or the path would fragment it; but this much always
// fits (IPv6's smallest MTU is 1,280) and holds all fixed parts and one SACK entry of full length.
constexpr size_t CONTROL_MIN_BYTES = 1'024;
constexpr uint32_t ECHOES_MAX = 16;
constexpr uint32_t PATH_NUMBERS = 256;
constexpr uint32_t BACKOFF_MAX = 8;

const FlowConfig& checked(const FlowConfig& config, std::span<std::byte> eager_memory) {
  const auto require = [](bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
  };
  require(config.path_count >= 1 && config.path_count <= PATH_NUMBERS, "path_count must be 1..256");
  require(config.payload_max_bytes % 4 == 0 && config.payload_max_bytes >= 64 && config.payload_max_bytes <= 65'536,
          "payload_max_bytes must be a multiple of 4 in 64..65536");
  require(
      std::has_single_bit(config.eager_slot_count) && config.eager_slot_count >= 8 && config.eager_slot_count <= 4'096,
      "eager_slot_count must be a power of two in 8..4096");
  require(config.ack_every_packets >= 1 && config.ack_delay_us >= 1, "acknowledgement limits must be positive");
  require(config.peer_timeout_us >= 1, "peer_timeout_us must be positive");
  require(eager_memory.size() >= size_t{config.eager_slot_count} * config.payload_max_bytes,
          "eager_memory must hold eager_slot_count * payload_max_bytes bytes");
  return config;
}

}  // namespace

struct Flow::State {
  State(const FlowConfig& config, std::span<std::byte> eager_memory, uint32_t eager_rkey)
      : config(checked(config, eager_memory)),
        ack_every_packets(std::clamp(config.window_bytes / config.payload_max_bytes / 4, 1u, config.ack_every_packets)),
        control_max_bytes(std::clamp<size_t>(config.payload_max_bytes, CONTROL_MIN_BYTES, CONTROL_MAX_BYTES)),
        recovery(config, counters),
        eager_sender(config),
        eager_receiver(config, eager_memory, eager_rkey),
        sender(config),
        receiver(config) {}

  void request_control(uint64_t at_us) { control_due_us = std::min(control_due_us, at_us); }
  void note_echo(uint64_t now_us, uint32_t path, uint32_t immediate);
  void count_refusal(Verdict verdict);
  bool can_send() const;
  bool idle() const;
  bool has_outstanding() const { return !idle() || receiver.has_open(); }
  uint64_t advert_retry_us() const;
  uint64_t nudge_at_us() const;
  uint64_t peer_lost_at_us() const;
  void forget();
  void lose_peer(std::string_view why);
  void repeat_last_word(uint64_t now_us);
  size_t write_control(uint64_t now_us, std::span<std::byte> out);
  size_t write_last_word(std::span<std::byte> out) const;
  void apply_control(uint64_t now_us, const ControlReader& control);

  const FlowConfig config;
  // Four times in a window at least (both sides have the same one), or its sender would wait for the timer.
  const uint32_t ack_every_packets;
  const size_t control_max_bytes;
  FlowCounters counters{};
  Recovery recovery;
  EagerSender eager_sender;
  EagerReceiver eager_receiver;
  Sender sender;
  Receiver receiver;
  SequenceRing<Event> events;
  std::string reason;

  bool dead = false;          // aborted here, or the peer is lost
  bool lost_pending = false;  // the peer_lost event is still to be given out
  bool closing = false;       // close() was called
  bool peer_closed = false;   // the peer said goodbye
  bool eager_deferred = false;
  bool ask = false;
  uint32_t last_words = 0;  // copies of goodbye or abort still to send

  uint64_t control_due_us = NEVER;
  uint32_t unacknowledged_packets = 0;
  uint64_t consumed_told = 0;
  uint64_t advert_sent_us = 0;
  uint32_t advert_retries = 0;
  uint64_t ask_at_us = NEVER;
  uint32_t asks = 0;
  uint64_t nudged_us = 0;
  uint32_t nudges = 0;
  uint64_t last_heard_us = 0, waiting_since_us = 0;

  struct Heard {
    uint64_t at_us;
    uint32_t immediate;
    bool listed;
  };
  std::array<Heard, PATH_NUMBERS> heard{};
  std::array<uint8_t, PATH_NUMBERS> heard_paths{};
  uint32_t heard_count = 0;
};

void Flow::State::note_echo(uint64_t now_us, uint32_t path, uint32_t immediate) {
  const auto number = static_cast<uint8_t>(path);
  if (!heard[number].listed) heard_paths[heard_count++] = number;
  heard[number] = Heard{now_us, immediate, true};
}

void Flow::State::count_refusal(Verdict verdict) {
  switch (verdict) {
    case Verdict::bad_key:
      ++counters.bad_key_packets;
      break;
    case Verdict::bad_range:
      ++counters.bad_range_packets;
      break;
    case Verdict::bad_slot:
      ++counters.bad_slot_packets;
      break;
    case Verdict::place:
    case Verdict::duplicate:
      break;
  }
}

bool Flow::State::can_send() const {
  if (recovery.allowance() == 0) return false;
  return recovery.has_lost() || (!recovery.full() && (eager_sender.has_unsent() || sender.has_unsent()));
}

bool Flow::State::idle() const {
  return recovery.outstanding() == 0 && eager_sender.all_received() && sender.open_transfers() == 0;
}

uint64_t Flow::State::advert_retry_us() const {
  if (!receiver.has_unseen_adverts() || receiver.has_unsent_adverts()) return NEVER;
  const uint64_t wait_us = recovery.round_trip().rto_us() << std::min(advert_retries, BACKOFF_MAX);
  return advert_sent_us + std::min(wait_us, RTO_MAX_US);
}

// The middle of a message, and nothing comes: the peer waits for an acknowledgement that was lost, or it is
// gone and will say so when asked.
uint64_t Flow::State::nudge_at_us() const {
  if (!receiver.has_partial()) return NEVER;
  const uint64_t wait_us = recovery.round_trip().rto_us() << std::min(nudges, BACKOFF_MAX);
  return std::max(last_heard_us, nudged_us) + std::min(wait_us, RTO_MAX_US);
}

uint64_t Flow::State::peer_lost_at_us() const {
  // A peer that computes between operations answers nothing, eager messages and adverts included, and is
  // well. In the middle of a bulk message both sides are in an operation, so one of them must hear the other.
  if (!sender.has_unacknowledged() && !receiver.has_partial()) return NEVER;
  return std::max(last_heard_us, waiting_since_us) + config.peer_timeout_us;
}

void Flow::State::forget() {
  recovery.clear();
  eager_sender.clear();
  sender.clear();
  receiver.clear();
  control_due_us = ask_at_us = NEVER;
  dead = true;
}

void Flow::State::lose_peer(std::string_view why) {
  if (dead) return;
  forget();
  reason = why;
  lost_pending = true;
}

// The peer goes on: it has not heard of the end yet.
void Flow::State::repeat_last_word(uint64_t now_us) {
  if (last_words != 0 || now_us - last_heard_us < RTO_MIN_US) return;
  last_heard_us = now_us;
  last_words = LAST_WORD_COPIES;
}

size_t Flow::State::write_last_word(std::span<std::byte> out) const {
  ControlWriter writer(out);
  writer.header.flags = CONTROL_ABORT;
  writer.add_reason(std::string_view(reason).substr(0, REASON_MAX_BYTES));
  return writer.finish();
}

size_t Flow::State::write_control(uint64_t now_us, std::span<std::byte> out) {
  ControlWriter writer(out.first(control_max_bytes));
  ControlHeader& header = writer.header;
  header.credits_seen = static_cast<uint32_t>(sender.credits_seen());
  header.flags = static_cast<uint8_t>((ask ? CONTROL_ASK : 0) | (sender.has_advert_gap() ? CONTROL_ADVERT_GAP : 0) |
                                      (closing ? CONTROL_GOODBYE : 0));
  receiver.write_done(writer);
  eager_receiver.write_state(writer);
  for (uint32_t index = 0; index < heard_count; ++index) {
    Heard& newest = heard[heard_paths[index]];
    newest.listed = false;
    if (index < ECHOES_MAX) writer.add_echo(Echo{newest.immediate, static_cast<uint32_t>(now_us - newest.at_us)});
  }
  heard_count = 0;
  receiver.write_sacks(writer);
  if (receiver.has_unsent_adverts()) {
    receiver.write_adverts(writer);
    advert_sent_us = now_us;
  }
  ask = false;
  unacknowledged_packets = 0;
  consumed_told = eager_receiver.consumed_below();
  if (last_words != 0) --last_words;
  const bool more = receiver.has_unsent_adverts() || receiver.has_postponed_sacks() || last_words != 0;
  control_due_us = more ? now_us : NEVER;
  return writer.finish();
}

void Flow::State::apply_control(uint64_t now_us, const ControlReader& control) {
  const ControlHeader& header = control.header();
  last_heard_us = now_us;
  for (uint32_t index = 0; index < header.echo_count; ++index) {
    const Echo echo = control.echo(index);
    recovery.on_echo(now_us, echo.immediate, echo.delay_us);
  }
  eager_sender.apply(header, control.eager(), [&](uint64_t packet) {
    recovery.on_acked(now_us, make_immediate(EAGER_SLOT, static_cast<uint32_t>(packet) & INDEX_MASK));
  });
  sender.apply_acks(now_us, control, recovery, events);
  recovery.end_of_acks(now_us);

  if (receiver.on_seen(header)) advert_retries = 0;
  const bool gap = (header.flags & CONTROL_ADVERT_GAP) != 0 && receiver.has_unseen_adverts();
  // Not sooner than one round trip after the last sending, which may have filled the gap.
  if (gap && now_us - advert_sent_us >= recovery.round_trip().smoothed_us()) {
    receiver.resend_adverts();
    request_control(now_us);
  }
  if (sender.apply_adverts(control, events)) request_control(now_us + config.ack_delay_us);
  if ((header.flags & CONTROL_ASK) != 0) request_control(now_us);
  if ((header.flags & CONTROL_GOODBYE) != 0 && !peer_closed) {
    peer_closed = true;
    if (has_outstanding()) lose_peer("said goodbye while messages were outstanding");
  }
}

Flow::Flow(const FlowConfig& config, std::span<std::byte> eager_memory, uint32_t eager_rkey)
    : state_(std::make_unique<State>(config, eager_memory, eager_rkey)) {}
Flow::~Flow() = default;

void Flow::set_remote_eager(uint64_t address, uint32_t rkey) { state_->eager_sender.set_remote(address, rkey); }

uint64_t Flow::eager_max_bytes() const { return state_->eager_sender.max_bytes(); }

bool Flow::send_eager(const MessageHeader& header, uint32_t flags, const void* data, uint64_t now_us) {
  State& state = *state_;
  if (state.peer_closed) state.lose_peer("said goodbye before this message");
  if (state.dead) return false;
  if (state.eager_sender.push(header, flags, data)) return true;
  if (state.ask_at_us == NEVER) state.ask_at_us = now_us + state.recovery.round_trip().rto_us();
  return false;
}

void Flow::advertise(uint64_t receive_id, const MessageHeader& header, std::byte* destination, uint32_t rkey,
                     uint64_t now_us) {
  State& state = *state_;
  if (state.peer_closed) state.lose_peer("said goodbye before this message");
  if (state.dead) return;
  state.receiver.advertise(receive_id, header, destination, rkey);
  if (state.receiver.has_unsent_adverts()) state.request_control(now_us);
}

void Flow::transfer(uint64_t send_id, uint64_t advert_id, const std::byte* data, uint64_t size_bytes, uint64_t now_us) {
  State& state = *state_;
  if (state.peer_closed) state.lose_peer("said goodbye before this message");
  if (state.dead) return;
  const char* error = state.sender.transfer(send_id, advert_id, data, size_bytes);
  if (error != nullptr) return state.lose_peer(error);
  if (!state.sender.has_unacknowledged()) state.waiting_since_us = now_us;
}

bool Flow::poll_event(Event& out) {
  State& state = *state_;
  if (state.dead && !state.lost_pending) return false;
  if (!state.eager_deferred) state.eager_receiver.consume();
  // A quarter of the ring at a time: the peer's window never closes while we keep up.
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
  out = Event{Event::Kind::peer_lost, {}, 0, 0, nullptr, 0, state.reason.c_str()};
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
  if (recovery.take_probe(now_us, out[0], path)) return 1;
  if (!state.can_send()) return 0;
  path = recovery.choose_path(now_us);
  const size_t limit = recovery.is_suspect(path) ? 1 : out.size();
  size_t count = 0;
  while (count < limit && state.can_send()) {
    DataOut& packet = out[count++];
    if (recovery.has_lost()) {
      packet = recovery.resend(now_us, path);
    } else {
      if (!state.eager_sender.has_unsent() && !state.sender.has_unacknowledged()) state.waiting_since_us = now_us;
      packet = state.eager_sender.has_unsent() ? state.eager_sender.take_unsent() : state.sender.take_unsent();
      recovery.on_sent(now_us, path, packet);
    }
    if (packet.size_bytes != state.config.payload_max_bytes) break;
  }
  return count;
}

size_t Flow::poll_control(uint64_t now_us, std::span<std::byte> out, uint32_t& path) {
  State& state = *state_;
  size_t size_bytes = 0;
  if (!state.dead && state.control_due_us <= now_us) {
    size_bytes = state.write_control(now_us, out);
  } else if (state.dead && state.last_words != 0) {
    --state.last_words;
    size_bytes = state.write_last_word(out);
  }
  if (size_bytes == 0) return 0;
  path = state.recovery.choose_path(now_us);
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

void Flow::on_data(uint64_t now_us, uint32_t path, uint32_t immediate, uint32_t size_bytes) {
  State& state = *state_;
  if (state.dead) return state.repeat_last_word(now_us);
  const bool eager = slot_of(immediate) == EAGER_SLOT;
  const Verdict verdict = eager ? state.eager_receiver.classify(index_of(immediate), size_bytes)
                                : state.receiver.classify(immediate, size_bytes);
  const uint64_t ack_delay_us = state.config.ack_delay_us;
  if (verdict == Verdict::duplicate) {
    state.last_heard_us = now_us;
    ++state.counters.duplicate_packets;
    if (!eager) state.receiver.on_duplicate(immediate);
    state.request_control(now_us + ack_delay_us / HURRY);
    return;
  }
  if (verdict != Verdict::place) return state.count_refusal(verdict);

  state.last_heard_us = now_us;
  state.nudges = 0;
  ++state.counters.data_packets_received;
  state.counters.data_bytes_received += size_bytes;
  state.note_echo(now_us, path, immediate);
  bool in_order, message_complete = false;
  if (eager) {
    in_order = state.eager_receiver.on_data(index_of(immediate), size_bytes);
  } else {
    const Receiver::Arrival arrival = state.receiver.on_data(immediate, state.events);
    in_order = arrival.in_order;
    message_complete = arrival.message_complete;
  }
  if (!in_order) ++state.counters.out_of_sequence;
  if (++state.unacknowledged_packets >= state.ack_every_packets || message_complete) {
    state.request_control(now_us);
  } else {
    state.request_control(now_us + (in_order ? ack_delay_us : ack_delay_us / HURRY));
  }
}

void Flow::on_control(uint64_t now_us, uint32_t, std::span<const std::byte> payload) {
  State& state = *state_;
  ++state.counters.control_packets_received;
  ControlReader control;
  if (!control.parse(payload)) {
    ++state.counters.bad_control_packets;
    return;
  }
  const bool aborts = (control.header().flags & CONTROL_ABORT) != 0;
  if (state.dead) {
    // Two dead sides do not answer each other.
    if (!aborts && (control.header().flags & CONTROL_GOODBYE) == 0) state.repeat_last_word(now_us);
    return;
  }
  if (aborts) return state.lose_peer("aborted: " + std::string(control.reason()));
  if (!state.eager_sender.check(control.header()) || !state.receiver.check_seen(control.header()) ||
      !state.sender.check(control)) {
    ++state.counters.bad_control_packets;
    return;
  }
  state.apply_control(now_us, control);
}

uint64_t Flow::next_timeout_us() const {
  const State& state = *state_;
  if (state.dead) return state.last_words != 0 ? 0 : NEVER;
  if (state.can_send()) return 0;
  return std::min({state.control_due_us, state.recovery.next_timeout_us(), state.advert_retry_us(), state.ask_at_us,
                   state.nudge_at_us(), state.peer_lost_at_us()});
}

void Flow::on_timeout(uint64_t now_us) {
  State& state = *state_;
  if (state.dead) return;
  if (state.peer_lost_at_us() <= now_us) {
    return state.lose_peer("sent nothing for " + std::to_string(state.config.peer_timeout_us / 1'000) +
                           " ms in the middle of a message");
  }
  state.recovery.on_timeout(now_us);
  if (state.advert_retry_us() <= now_us) {
    state.receiver.resend_adverts();
    state.advert_retries = std::min(state.advert_retries + 1, BACKOFF_MAX);
    state.request_control(now_us);
  }
  if (state.nudge_at_us() <= now_us) {
    state.nudged_us = now_us;
    state.nudges = std::min(state.nudges + 1, BACKOFF_MAX);
    state.ask = true;
    state.request_control(now_us);
  }
  if (state.ask_at_us <= now_us) {
    if (state.eager_sender.is_waiting()) {
      state.ask |= state.eager_sender.all_received();
      state.asks = std::min(state.asks + 1, BACKOFF_MAX);
      state.ask_at_us = now_us + std::min(state.recovery.round_trip().rto_us() << state.asks, RTO_MAX_US);
      if (state.ask) state.request_control(now_us);
    } else {
      state.ask_at_us = NEVER;
      state.asks = 0;
    }
  }
}

void Flow::on_peer_failed(std::string_view reason) { state_->lose_peer(reason); }

bool Flow::idle() const { return state_->dead || state_->idle(); }

void Flow::abort(std::string_view reason) {
  State& state = *state_;
  const bool tell = !state.dead && !state.peer_closed;
  state.forget();
  state.events.clear();
  state.lost_pending = false;
  if (!tell) return;
  state.reason = reason;
  state.last_words = LAST_WORD_COPIES;
}

void Flow::close() {
  State& state = *state_;
  if (state.dead || state.closing) return;
  state.closing = true;
  state.last_words = LAST_WORD_COPIES;
  state.request_control(0);
}

const FlowCounters& Flow::counters() const { return state_->counters; }

std::string Flow::describe() const {
  const State& state = *state_;
  const Paths& paths = state.recovery.paths();
  uint32_t suspended = 0;
  for (uint32_t index = 0; index < paths.count(); ++index) suspended += paths[index].timeouts != 0;
  std::string text = state.dead ? "dead (" + state.reason + "), " : "";
  text += std::to_string(paths.count()) + " paths (" + std::to_string(suspended) + " not answering), rtt " +
          std::to_string(state.counters.rtt_us) + " us, " + std::to_string(state.recovery.outstanding()) +
          " packets unacknowledged, " + std::to_string(state.sender.open_transfers()) + " transfers and " +
          std::to_string(state.receiver.open_credits()) + " credits open, " +
          std::to_string(state.counters.retransmitted_packets) + " retransmitted, " +
          std::to_string(state.counters.local_ack_timeout_err) + " timeouts";
  return text;
}

}  // namespace sennit::flow
