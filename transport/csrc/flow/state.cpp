// SPDX-License-Identifier: Apache-2.0
#include "flow/state.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <utility>

#include "flow/immediate.hpp"
#include "flow/mechanisms.hpp"
#include "telemetry/counter_page.hpp"
#include "wire/utf8.hpp"

namespace sennit::flow {
namespace {

// A control packet must not be larger than a data packet, or the path would fragment it. But this much always fits
// (IPv6's smallest MTU is 1,280) and holds all fixed parts and one SACK entry of full length.
constexpr size_t CONTROL_MIN_BYTES = 1'024;
constexpr uint32_t ECHOES_MAX = 16;
// How often a control is repeated while nothing comes, and after how many acknowledgement delays.
constexpr uint32_t REPEATS_MAX = 2;
constexpr uint64_t REPEAT_DELAYS = 2;

const FlowConfig& checked(const FlowConfig& config, std::span<std::byte> eager_memory) {
  const auto require = [](bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
  };
  require(config.path_count >= 1 && config.path_count <= PATH_NUMBERS, "path_count must be 1..256");
  require(config.payload_max_bytes % 4 == 0 && config.payload_max_bytes >= 64 && config.payload_max_bytes <= 65'536,
          "payload_max_bytes must be a multiple of 4 in 64..65536");
  require(
      std::has_single_bit(config.eager_slot_count) && config.eager_slot_count >= 8 && config.eager_slot_count <= 1'024,
      "eager_slot_count must be a power of two in 8..1024");
  require(config.rail_count >= 1 && config.rail_count <= config.path_count, "rail_count must be 1..path_count");
  require(config.ack_every_packets >= 1 && config.ack_delay_us >= 1, "acknowledgement limits must be positive");
  require(config.peer_timeout_us >= 1, "peer_timeout_us must be positive");
  require(eager_memory.size() >= size_t{config.eager_slot_count} * eager_slot_bytes(config),
          "eager_memory must hold eager_slot_count slots");
  return config;
}

}  // namespace

Flow::State::State(const FlowConfig& config, std::span<std::byte> eager_memory, uint32_t eager_rkey)
    : config(checked(config, eager_memory)),
      counters(config.counter_page != nullptr ? config.counter_page->place<FlowCounters>(config.ends.peer)
                                              : own_counters),
      control_max_bytes(std::clamp<size_t>(config.payload_max_bytes, CONTROL_MIN_BYTES, CONTROL_MAX_BYTES)),
      recovery(config, counters),
      eager_sender(config),
      eager_receiver(config, eager_memory, eager_rkey),
      sender(config),
      receiver(config),
      grants(config.receive_budget, config.payload_max_bytes),
      ack_pacing(config),
      silence(config.peer_timeout_us) {}

void Flow::State::note_arrival(uint64_t now_us, uint32_t path, uint32_t immediate, bool ecn_marked,
                               uint64_t waited_us) {
  const auto number = static_cast<uint8_t>(path);
  Heard& newest = heard[number];
  if (!newest.listed) heard_paths[heard_count++] = number;
  newest.listed = true;
  newest.at_us = now_us;
  newest.immediate = immediate;
  newest.waited_us = static_cast<uint16_t>(std::min<uint64_t>(waited_us, UINT16_MAX));
  ++newest.received;
  newest.marked += ecn_marked;
  counters.np_ecn_marked_roce_packets += ecn_marked;
  newest_heard_path = number;
}

// A path on which the peer was heard last is likely to work the other way too. A receiver has no data of its own in
// flight that would show dead paths.
uint32_t Flow::State::control_path(uint64_t now_us) {
  // The peer or this side repeats something. Every other time, try the next of all paths, whatever its state. Only data
  // finds out that a path is dead, and a path may be dead in one direction only.
  if (repeats_itself || is_second_answer) {
    if (!uses(Mechanism::other_control)) {
      is_second_answer = false;
    } else if (is_second_answer || ++repetitions % 2 == 0) {
      repeats_itself = is_second_answer = false;
      return ++other_path % config.path_count;
    }
    repeats_itself = false;
  }
  // This holds even if our own packets got no answer on it: if it were dead in this direction, the peer would leave it.
  if (heard_count != 0 && newest_heard_path < config.path_count) return newest_heard_path;
  return recovery.choose_path(now_us);
}

void Flow::State::count_refusal(Verdict verdict) {
  switch (verdict) {
    case Verdict::bad_key:
      ++counters.bad_key;
      break;
    case Verdict::bad_range:
      ++counters.bad_range;
      break;
    case Verdict::bad_slot:
      ++counters.bad_slot;
      break;
    case Verdict::place:
    case Verdict::duplicate:
      break;
  }
}

void Flow::State::choose_key(uint32_t path, DataOut& packet) const {
  if (config.key_of_rail.empty() || slot_of(packet.immediate) == EAGER_SLOT) return;
  packet.rkey = sender.keys_of(packet.immediate).of[config.key_of_rail[path % config.rail_count]];
}

bool Flow::State::can_send() const {
  if (recovery.allowance() == 0) return false;
  return recovery.has_lost() || (!recovery.full() && (eager_sender.has_unsent() || sender.has_unsent()));
}

bool Flow::State::idle() const {
  return recovery.outstanding() == 0 && eager_sender.all_received() && sender.open_transfers() == 0;
}

uint64_t Flow::State::advert_retry_us() const {
  const bool is_asking = receiver.has_unseen_adverts() || receiver.is_short();
  if (!uses(Mechanism::advert_retry) || !is_asking || receiver.has_unsent_adverts()) return NEVER;
  // A sender that has something for it answers within a round-trip time. A computing one is asked ever more rarely.
  const uint64_t wait_us = recovery.round_trip().pto_us(config.ack_delay_us)
                           << std::min(advert_retries, ADVERT_BACKOFF_MAX);
  return advert_sent_us + std::min(wait_us, RTO_MAX_US);
}

// In the middle of a bulk message each side waits for the other. The flow does not know of other waits: see expect().
uint64_t Flow::State::look_at_us() const {
  return sender.has_unacknowledged() || receiver.has_partial() ? silence.next_look_us() : NEVER;
}

void Flow::State::look_for_life(uint64_t now_us) {
  switch (silence.look(now_us)) {
    case Silence::Step::wait:
      return;
    case Silence::Step::ask:
      // Ask first where the peer was heard last, then elsewhere, because that path may have died.
      if (silence.questions() == 1) life_path = newest_heard_path;
      life_probes = 1;
      return;
    case Silence::Step::ask_everywhere:
      life_probes = config.path_count;
      return;
    case Silence::Step::give_up:
      return lose_peer(describe_silence());
  }
}

std::string Flow::State::describe_silence() const {
  return "gave no sign of life for " + Silence::seconds(silence.silent_us()) + " (SENNIT_PEER_TIMEOUT_S): asked " +
         std::to_string(silence.questions()) + " times, in the end over " +
         (config.path_count == 1 ? "its only path" : "all " + std::to_string(config.path_count) + " paths") +
         (silence.heard_us() == 0 ? ", never heard from since the group was made" : "");
}

void Flow::State::forget() noexcept {
  recovery.clear();
  eager_sender.clear();
  sender.clear();
  receiver.clear();
  grants.clear();
  control_due_us = ask_at_us = repeat_at_us = NEVER;
  life_probes = 0;
  dead = true;
}

void Flow::State::lose_peer(std::string_view why) {
  if (dead) return;
  forget();
  reason = why;
  lost_pending = true;
}

// The peer continues, so it has not heard of the end yet.
void Flow::State::repeat_last_word(uint64_t now_us) {
  if (closing || last_words != 0 || now_us - silence.heard_us() < RTO_MIN_US) return;
  silence.on_heard(now_us);
  last_words = LAST_WORD_COPIES;
}

size_t Flow::State::write_last_word(std::span<std::byte> out) const {
  ControlWriter writer(out);
  writer.header.flags = CONTROL_ABORT;
  writer.add_reason(utf8_prefix(reason, REASON_MAX_BYTES));
  return writer.finish();
}

// The part of every control. A probe carries it too, although it is likely to be lost.
void Flow::State::write_cumulative(uint64_t now_us, ControlWriter& writer, uint8_t flags) {
  writer.header.flags = static_cast<uint8_t>(flags | (receiver.is_short() ? CONTROL_SHORT : 0));
  writer.header.credits_seen = static_cast<uint32_t>(sender.credits_seen());
  writer.header.granted = grants.issue(now_us, receiver.received_packets(), recovery.round_trip().smoothed_us());
  receiver.write_done(writer);
  eager_receiver.write_state(writer);
}

size_t Flow::State::write_probe(uint64_t now_us, std::span<std::byte> out) {
  ControlWriter writer(out.first(control_max_bytes));
  write_cumulative(now_us, writer, CONTROL_PROBE);
  writer.header.probe_number = recovery.probe_number();
  return writer.finish();
}

size_t Flow::State::write_control(uint64_t now_us, std::span<std::byte> out) {
  ControlWriter writer(out.first(control_max_bytes));
  write_cumulative(now_us, writer,
                   static_cast<uint8_t>((ask ? CONTROL_ASK : 0) | (sender.has_advert_gap() ? CONTROL_ADVERT_GAP : 0) |
                                        (closing ? CONTROL_GOODBYE : 0)));
  writer.header.queue_us = static_cast<uint16_t>(std::min<uint64_t>(recovery.take_queue_us(), UINT16_MAX));
  queue_reported_us = now_us;
  for (uint32_t index = 0; index < heard_count; ++index) {
    Heard& newest = heard[heard_paths[index]];
    newest.listed = false;
    if (index >= ECHOES_MAX) continue;
    const auto delay_us = static_cast<uint32_t>(std::min<uint64_t>(now_us - newest.at_us, ECHO_DELAY_MAX_US));
    writer.add_echo({newest.immediate, delay_us, heard_paths[index], newest.received, newest.marked, newest.waited_us});
  }
  heard_count = 0;
  receiver.write_sacks(writer);
  if (receiver.has_unsent_adverts() || receiver.is_short()) advert_sent_us = now_us;
  if (receiver.has_unsent_adverts()) receiver.write_adverts(writer, now_us);
  // Asked again with nothing new in between: the answer's path may be dead in this direction, so it is sent twice.
  is_second_answer |= uses(Mechanism::second_answer) && is_asked && answered_since_data;
  answered_since_data |= std::exchange(is_asked, false);
  ask = false;
  ack_pacing.on_acknowledged();
  consumed_told = eager_receiver.consumed_below();
  if (last_words != 0) --last_words;
  const bool more =
      receiver.has_unsent_adverts() || receiver.has_postponed_sacks() || last_words != 0 || is_second_answer;
  control_due_us = more ? now_us : NEVER;
  // In the middle of a message the sender needs this control: a lost one would take a grant or the tail's state along.
  repeat_at_us = uses(Mechanism::repeat_control) && receiver.has_partial() && repeats < REPEATS_MAX
                     ? now_us + REPEAT_DELAYS * config.ack_delay_us
                     : NEVER;
  return writer.finish();
}

void Flow::State::apply_control(uint64_t now_us, uint64_t waited_us, const ControlReader& control) {
  const ControlHeader& header = control.header();
  silence.on_heard(now_us);
  const uint64_t granted_before = sender.granted_packets();
  for (uint32_t index = 0; index < header.echo_count; ++index) recovery.on_echo(now_us, control.echo(index), waited_us);
  eager_sender.apply(header, control.eager(), [&](uint64_t packet) {
    recovery.on_acked(now_us, make_immediate(EAGER_SLOT, static_cast<uint32_t>(packet) & INDEX_MASK));
  });
  sender.apply_acks(now_us, control, recovery, events);
  recovery.end_of_acks(now_us);
  sender.on_granted(header.granted);
  if (credit_stalled && sender.granted_packets() != granted_before) {
    credit_stalled = false;
    trace::credit_stall_end(config.ends, sender.granted_packets());
  }
  if (header.queue_us != 0) grants.on_queue_report(header.queue_us);
  // A receiver that limits us cannot see its own queue: report it, once in a round-trip time.
  if (sender.has_unacknowledged() && sender.is_granted_narrowly() && recovery.newest_queue_us() != 0 &&
      now_us >= queue_reported_us + recovery.round_trip().smoothed_us())
    request_control(now_us);

  is_peer_short = (header.flags & CONTROL_SHORT) != 0;
  if (receiver.on_seen(header)) advert_retries = 0;
  const bool gap =
      uses(Mechanism::advert_gap) && (header.flags & CONTROL_ADVERT_GAP) != 0 && receiver.has_unseen_adverts();
  // Not sooner than one round-trip time after they were last sent, which may have filled the gap.
  if (gap && now_us - receiver.oldest_unseen_sent_us() >= recovery.round_trip().smoothed_us()) {
    receiver.resend_adverts();
    repeats_itself = true;
    request_control(now_us);
  }
  if (sender.apply_adverts(control, events)) request_control(now_us + config.ack_delay_us);
  if ((header.flags & CONTROL_ASK) != 0) request_control(now_us);
  if ((header.flags & CONTROL_GOODBYE) != 0 && !peer_closed) {
    peer_closed = true;
    if (has_outstanding()) lose_peer("said goodbye while messages were outstanding");
  }
}

}  // namespace sennit::flow
