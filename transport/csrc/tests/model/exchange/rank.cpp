// SPDX-License-Identifier: Apache-2.0
#include "model/exchange/rank.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "model/violation.hpp"

namespace sennit::model::exchange {
namespace {

constexpr std::byte AFTER_SEND{0xEE}, AFTER_RECEIVE{0xDD}, AFTER_END{0xCC};

std::byte byte_of(uint32_t message, uint32_t at, bool is_result) {
  if (at < NUMBER_BYTES && !is_result) return static_cast<std::byte>(message >> 8 * at);
  return static_cast<std::byte>(message * 131 + at * 7 + (at >> 8) + (is_result ? 91 : 0));
}

}  // namespace

Rank::Rank(const Schedule& schedule, uint32_t number, Network& network, bool is_verbose)
    : schedule_(schedule),
      number_(number),
      is_verbose_(is_verbose),
      port_(number, schedule.world, nullptr, PEER_TIMEOUT_US),
      mailbox_(number, schedule.world),
      exposure_(number, [this] { return next_key_++; }),
      loans_(exposure_, std::make_shared<LoanMemory>()),
      remotes_(schedule.world),
      sends_(schedule.messages.size()),
      receives_(schedule.messages.size()),
      threads_(THREADS_MAX),
      at_(THREADS_MAX, 0) {
  for (const Call& call : schedule.calls)
    if (call.rank == number) threads_[call.thread].push_back(call);
  for (uint32_t peer = 0; peer < schedule.world; ++peer) {
    if (schedule.share_memory(number, peer)) continue;
    remotes_[peer] = std::make_unique<Remote>(schedule, number, peer, network, exposure_, loans_, mailbox_);
    mailbox_.set_lane(peer, &remotes_[peer]->lane());
  }
}

Rank::~Rank() { mailbox_.abandon(); }

void Rank::meet(Rank& peer) {
  if (const auto& remote = remotes_[peer.number_]) return remote->introduce(*peer.remotes_[number_]);
  std::string why;
  require(port_.accept(peer.number_, peer.port_.offer(), &why),
          [&] { return "rank " + std::to_string(peer.number_) + " is not reached: " + why; });
  port_.connect(peer.number_, mailbox_);
  mailbox_.set_lane(peer.number_, &port_.lane(peer.number_));
}

void Rank::set_memory(uint32_t message, bool is_receive, std::byte* data) {
  (is_receive ? receives_ : sends_)[message].data = data;
}

void Rank::begin() {
  for (uint32_t number = 0; number < sends_.size(); ++number) {
    const uint32_t size_bytes = schedule_.messages[number].size_bytes;
    if (sends_[number].data == nullptr) continue;
    for (uint32_t at = 0; at < size_bytes; ++at) sends_[number].data[at] = byte_of(number, at, false);
  }
}

MessageHeader Rank::header_of(const Message& message) const {
  const auto number = static_cast<uint64_t>(&message - schedule_.messages.data());
  const uint64_t key = message.channel == NONE ? (number + 1) << KEY_SLOT_BITS : P2P_KEY | message.channel;
  return {key, 0, message.size_bytes};
}

bool Rank::turn(uint64_t now_us, uint32_t calls) {
  bool moved = release_loans();
  for (uint32_t left = calls; left > 0 && !has_ended_; --left) {
    for (uint32_t thread = 0; thread < THREADS_MAX; ++thread) {
      if (at_[thread] == threads_[thread].size() || !is_satisfied(threads_[thread][at_[thread]])) continue;
      make(threads_[thread][at_[thread]++]);
      moved = true;
    }
  }
  moved |= mailbox_.progress(now_us);
  moved |= port_.progress(now_us);
  port_.tell_peers(false, now_us);
  moved |= drive_remotes(now_us);
  require(port_.failure().empty(), [&] { return std::string(port_.failure()); });
  if (const MailboxFailure* const failure = mailbox_.failure()) {
    failure_ = "rank " + std::to_string(failure->peer) + " " + failure->reason;
    require(failure->kind != MailboxFailure::Kind::mismatch, failure_);
    was_told_of_abort_ = failure->kind == MailboxFailure::Kind::peer_aborted;
    end(failure_.c_str());
    return true;
  }
  return moved;
}

bool Rank::drive_remotes(uint64_t now_us) {
  bool moved = false;
  for (const auto& remote : remotes_)
    if (remote) moved |= remote->drive(now_us);
  return moved;
}

void Rank::answer(uint64_t now_us) { drive_remotes(now_us); }

bool Rank::is_ending(uint32_t peer) {
  if (remotes_[peer]) return remotes_[peer]->lane().flow().ended();
  return static_cast<const ShmLane&>(port_.lane(peer)).is_ending();
}

bool Rank::is_satisfied(const Call& call) const {
  switch (call.kind) {
    case Call::Kind::await_send:
      return sends_[call.message].is_complete;
    case Call::Kind::await_receive:
      return receives_[call.message].is_complete;
    default:
      return true;
  }
}

void Rank::make(const Call& call) {
  if (is_verbose_)
    std::printf("rank %u thread %u: call %d of message %u\n", number_, call.thread, static_cast<int>(call.kind),
                call.message);
  if (call.kind == Call::Kind::send) return post_send(call.message);
  if (call.kind != Call::Kind::receive) return;
  const Message& message = schedule_.messages[call.message];
  receives_[call.message].is_posted = true;
  mailbox_.receive(*this, 2 * call.message + 1, message.is_any ? SENNIT_ANY_PEER : message.from, header_of(message),
                   message.is_loan ? nullptr : receives_[call.message].data, message.use == Lane::Use::round_trip);
}

void Rank::post_send(uint32_t number) {
  const Message& message = schedule_.messages[number];
  sends_[number].is_posted = true;
  const bool was_ending = is_ending(message.to);
  mailbox_.send(*this, 2 * number, message.to, header_of(message), sends_[number].data, message.use);
  require(!was_ending || !sends_[number].is_complete,
          [&] { return "message " + std::to_string(number) + " was sent to a rank that is known to have ended"; });
}

void Rank::on_message_sent(uint32_t step) {
  const uint32_t number = step / 2;
  const Message& message = schedule_.messages[number];
  Place& send = sends_[number];
  if (is_verbose_) std::printf("rank %u: message %u is sent\n", number_, number);
  require(!has_ended_, "a send was complete after the end");
  require(send.is_posted && !send.is_complete, "a send was complete twice, or before it was posted");
  if (message.use == Lane::Use::round_trip) require_message(number, send.data, true);
  send.is_complete = true;
  // The program uses its memory again at once.
  std::fill_n(send.data, message.size_bytes, AFTER_SEND);
}

void Rank::on_message_received(uint32_t step, uint32_t peer, const std::byte* data, uint64_t loan) {
  const uint32_t posted = step / 2;
  const Message& asked = schedule_.messages[posted];
  Place& receive = receives_[posted];
  require(!has_ended_, "a receive was complete after the end");
  require(receive.is_posted && !receive.is_complete, "a receive was complete twice, or before it was posted");
  uint32_t number = posted;
  if (asked.channel != NONE) std::memcpy(&number, data, NUMBER_BYTES);
  if (is_verbose_) std::printf("rank %u: receive %u took message %u of rank %u\n", number_, posted, number, peer);
  require(number < schedule_.messages.size(), "a message has no number");
  const Message& message = schedule_.messages[number];
  require(message.channel == asked.channel && message.to == number_ && message.from == peer,
          [&] { return "message " + std::to_string(number) + " is not for receive " + std::to_string(posted); });
  receive.got = number;
  if (asked.is_loan) {
    // It may lie in the memory of a peer that ended. `release` says so.
    held_.push_back({posted, const_cast<std::byte*>(data), loan, asked.hold_rounds});
    return;
  }
  require(data == receive.data, "a message is not where it was wanted");
  require_message(number, data, false);
  receive.is_complete = true;
  std::fill_n(receive.data, message.size_bytes, AFTER_RECEIVE);
}

void Rank::require_message(uint32_t number, const std::byte* data, bool is_result) const {
  const uint32_t size_bytes = schedule_.messages[number].size_bytes;
  for (uint32_t at = 0; at < size_bytes; ++at)
    require(data[at] == byte_of(number, at, is_result), [&] {
      return "byte " + std::to_string(at) + " of message " + std::to_string(number) + " is " +
             std::to_string(static_cast<int>(data[at]));
    });
}

bool Rank::release_loans() {
  bool moved = false;
  for (size_t at = 0; at < held_.size() && !has_ended_;) {
    Held& held = held_[at];
    const Message& message = schedule_.messages[held.message];
    moved |= held.rounds != 0;
    const uint32_t until = message.hold_until;
    const bool is_held =
        until != NONE && !(schedule_.messages[until].to == number_ ? receives_ : sends_)[until].is_complete;
    if (held.rounds != 0 ? (--held.rounds, true) : is_held) {
      ++at;
      continue;
    }
    const Held released = held;
    held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(at));
    moved = true;
    if (message.use != Lane::Use::round_trip) {
      // It was read meanwhile.
      const std::vector<std::byte> seen(released.data, released.data + message.size_bytes);
      if (!mailbox_.release(released.loan)) return true;  // the group fails
      require_message(released.message, seen.data(), false);
    } else {
      if (!mailbox_.open(released.loan)) return true;
      for (uint32_t byte = 0; byte < message.size_bytes; ++byte)
        released.data[byte] = byte_of(released.message, byte, true);
      mailbox_.send_back(released.loan);
    }
    receives_[released.message].is_complete = true;
  }
  return moved;
}

void Rank::abort() { end("the program failed"); }

void Rank::leave() {
  end(nullptr);
  port_.close();
}

void Rank::end(const char* last_word) {
  has_ended_ = true;
  held_.clear();
  mailbox_.abandon();
  if (last_word != nullptr) port_.abort(last_word);
  port_.revoke();
  for (const auto& remote : remotes_)
    if (remote) last_word != nullptr ? remote->abort(last_word) : remote->leave();
  for (uint32_t number = 0; number < sends_.size(); ++number)
    for (const Place* const place : {&sends_[number], &receives_[number]})
      if (place->data != nullptr) std::fill_n(place->data, schedule_.messages[number].size_bytes, AFTER_END);
}

bool Rank::is_done() const {
  for (uint32_t thread = 0; thread < THREADS_MAX; ++thread)
    if (at_[thread] != threads_[thread].size()) return false;
  const auto is_open = [](const Place& place) { return place.is_posted && !place.is_complete; };
  return std::ranges::none_of(sends_, is_open) && std::ranges::none_of(receives_, is_open);
}

bool Rank::is_settled() {
  if (!mailbox_.describe_outstanding().empty()) return false;
  for (uint32_t peer = 0; peer < schedule_.world; ++peer) {
    if (peer == number_) continue;
    if (remotes_[peer] ? !remotes_[peer]->lane().is_settled()
                       : static_cast<const ShmLane&>(port_.lane(peer)).debts() != ShmLane::Debts{})
      return false;
  }
  return true;
}

bool Rank::awaits_any() const {
  for (uint32_t number = 0; number < receives_.size(); ++number)
    if (schedule_.messages[number].is_any && receives_[number].is_posted && !receives_[number].is_complete) return true;
  return false;
}

void Rank::judge() const {
  for (uint32_t number = 0; number < sends_.size(); ++number) {
    const uint32_t size_bytes = schedule_.messages[number].size_bytes;
    for (const bool is_receive : {false, true}) {
      const Place& place = (is_receive ? receives_ : sends_)[number];
      if (place.data == nullptr || !(place.is_complete || has_ended_)) continue;
      const std::byte left = has_ended_ ? AFTER_END : is_receive ? AFTER_RECEIVE : AFTER_SEND;
      for (uint32_t at = 0; at < size_bytes; ++at)
        require(place.data[at] == left, [&] {
          return "rank " + std::to_string(number_) + ": memory of message " + std::to_string(number) +
                 " was written after its end";
        });
    }
  }
  // Of one sender and channel, receives take the messages in the order of both. One thread posts each side.
  for (uint32_t channel = 0; channel < schedule_.channels.size(); ++channel) {
    std::vector<uint32_t> next(schedule_.world, 0);
    std::vector<std::vector<uint32_t>> sent(schedule_.world);
    for (const Call& call : schedule_.calls)
      if (call.kind == Call::Kind::send && schedule_.messages[call.message].channel == channel)
        sent[call.rank].push_back(call.message);
    for (const Call& call : threads_[schedule_.channels[channel].to_thread]) {
      if (call.kind != Call::Kind::receive || schedule_.messages[call.message].channel != channel) continue;
      const uint32_t got = receives_[call.message].got;
      if (got == NONE) continue;
      const uint32_t from = schedule_.messages[got].from;
      while (next[from] < sent[from].size() && sent[from][next[from]] != got) {
        // A receive that was matched, and is not complete, may have the one before.
        require(!is_done(), "a message overtook another one of its channel");
        ++next[from];
      }
      require(next[from]++ < sent[from].size(), "a message overtook another one of its channel");
    }
  }
}

std::string Rank::describe() {
  std::string text = "rank " + std::to_string(number_) + ": ";
  if (is_frozen_) text += "frozen; ";
  if (has_ended_) return text + "ended " + failure_ + "\n";
  for (uint32_t thread = 0; thread < THREADS_MAX; ++thread)
    if (at_[thread] != threads_[thread].size()) {
      const Call& call = threads_[thread][at_[thread]];
      text += "thread " + std::to_string(thread) + " is at call " + std::to_string(static_cast<int>(call.kind)) +
              " of message " + std::to_string(call.message) + "; ";
    }
  return text + std::to_string(held_.size()) + " loans held; " + mailbox_.describe_outstanding() + "\n";
}

}  // namespace sennit::model::exchange
