// SPDX-License-Identifier: Apache-2.0
#include "flow/sender.hpp"

#include <algorithm>
#include <bit>

namespace sennit::flow {

Sender::Sender(const FlowConfig& config)
    : payload_max_bytes_(config.payload_max_bytes), peer_key_count_(config.peer_key_count) {}

const char* Sender::transfer(uint64_t send_id, uint64_t advert_id, const std::byte* data, uint64_t size_bytes) {
  if (!messages_.holds(advert_id)) return "transfer into an advert that does not exist";
  Message& message = messages_[advert_id];
  if (message.bound || message.is_returned) return "two transfers into one advert";
  if (message.header.size_bytes != size_bytes) return "transfer of another size than the advert's";
  message.bound = true;
  message.send_id = send_id;
  message.data = data;
  ++open_transfers_;
  for (uint64_t number = message.first_credit; number != message.end_credit; ++number) send_credit(number);
  return nullptr;
}

bool Sender::give_back(Event& out) {
  for (uint64_t id = messages_.first(); id != messages_.end(); ++id) {
    Message& message = messages_[id];
    if (message.first_credit >= completed_below_ + CREDIT_WINDOW / 2) return false;
    // An empty packet of an empty message would be the message.
    if (message.bound || message.is_returned || message.header.size_bytes == 0) continue;
    message.is_returned = true;
    ++open_transfers_;
    for (uint64_t number = message.first_credit; number != message.end_credit; ++number) send_credit(number);
    out = Event{Event::Kind::advert, message.header, 0, id, nullptr, 0, nullptr};
    return true;
  }
  return false;
}

void Sender::send_credit(uint64_t number) {
  Credit& credit = this->credit(number);
  if (messages_[credit.message].is_returned) credit.packet_count = 1;
  to_send_.push(number);
}

bool Sender::has_unsent() const { return sent_packets_ < granted_packets_ && is_within_reach(); }

bool Sender::is_within_reach() const {
  if (to_send_.empty()) return false;
  const Credit& credit = this->credit(to_send_.front());
  return credit.next_unsent < credit.acked_below + SACK_REACH_PACKETS;
}

DataOut Sender::take_unsent() {
  const uint64_t number = to_send_.front();
  Credit& credit = this->credit(number);
  const uint32_t index = credit.next_unsent++;
  const uint32_t offset = index * payload_max_bytes_;
  ++sent_packets_;
  if (index == 0) ++partial_credits_;
  if (credit.next_unsent == credit.packet_count) to_send_.pop();
  if (messages_[credit.message].is_returned)
    return DataOut{credit.address, credit.keys.of[0], make_immediate(credit_slot(number), 0), nullptr, 0};
  return DataOut{credit.address + offset, credit.keys.of[0], make_immediate(credit_slot(number), index),
                 messages_[credit.message].data + credit.offset + offset,
                 std::min(payload_max_bytes_, credit.part_bytes - offset)};
}

const Keys& Sender::keys_of(uint32_t immediate) const {
  // All such credits are less than one lap of slots from the oldest one.
  const uint32_t ahead = slot_of(immediate) + CREDIT_SLOTS - credit_slot(completed_below_);
  return credit(completed_below_ + ahead % CREDIT_SLOTS).keys;
}

bool Sender::check(const ControlReader& control) const {
  const ControlHeader& header = control.header();
  const uint64_t completed = nearest<32>(header.completed_below, completed_below_);
  if (completed > credits_seen_) return false;
  for (uint64_t number = completed_below_; number < completed; ++number)
    if (!all_sent(number)) return false;
  const WordView done = control.done();
  for (uint32_t index = 0; index < done.count(); ++index)
    for (uint64_t word = done[index]; word != 0; word &= word - 1) {
      const uint64_t number = completed + 1 + index * 64 + static_cast<uint32_t>(std::countr_zero(word));
      if (number >= completed_below_ && !all_sent(number)) return false;
    }
  const bool sacks_possible = control.each_sack([&](const Sack& sack) {
    const uint64_t number = nearest<32>(sack.credit, completed_below_);
    if (number < completed_below_) return true;
    return number < credits_seen_ && sack.first_missing <= credit(number).next_unsent;
  });
  if (!sacks_possible) return false;

  if (header.advert_count == 0) return true;
  const uint64_t first = nearest<32>(header.advert_first, credits_seen_);
  const uint64_t end = first + header.advert_count;
  if (end < first || end > std::max(completed, completed_below_) + CREDIT_WINDOW) return false;
  uint64_t missing_bytes = this->missing_bytes();
  return control.each_advert([&](uint32_t index, const Advert& advert) {
    // An advert that comes too early is checked when its turn comes.
    if (first + index < credits_seen_ || first > credits_seen_) return true;
    return is_possible(advert, missing_bytes);
  });
}

uint64_t Sender::missing_bytes() const {
  if (messages_.empty()) return 0;
  const Message& newest = messages_[messages_.end() - 1];
  return newest.header.size_bytes - newest.advertised_bytes;
}

bool Sender::is_possible(const Advert& advert, uint64_t& missing_bytes) const {
  if (advert.first_part != (missing_bytes == 0) || advert.keys.count != peer_key_count_) return false;
  if (advert.first_part) missing_bytes = advert.message_bytes;
  const bool part_possible = advert.part_bytes <= missing_bytes && (advert.part_bytes != 0 || missing_bytes == 0) &&
                             advert.part_bytes <= uint64_t{CREDIT_MAX_PACKETS} * payload_max_bytes_;
  missing_bytes -= advert.part_bytes;
  return part_possible;
}

void Sender::complete(uint64_t now_us, uint64_t number, Recovery& recovery, SequenceRing<Event>& events) {
  Credit& credit = this->credit(number);
  if (credit.complete) return;
  for (uint32_t index = credit.acked_below; index < credit.packet_count; ++index)
    if (!credit.acked.test(index)) recovery.on_acked(now_us, make_immediate(credit_slot(number), index));
  credit.complete = true;
  credit.acked_below = credit.packet_count;
  --partial_credits_;
  Message& message = messages_[credit.message];
  message.acknowledged_bytes += credit.part_bytes;
  if (message.acknowledged_bytes != message.header.size_bytes) return;
  message.sent = true;
  --open_transfers_;
  if (!message.is_returned)
    events.push(Event{Event::Kind::sent, message.header, 0, message.send_id, nullptr, 0, nullptr});
  while (!messages_.empty() && messages_.front().sent) messages_.pop();
}

void Sender::apply_sack(uint64_t now_us, const Sack& sack, Recovery& recovery) {
  const uint64_t number = nearest<32>(sack.credit, completed_below_);
  if (number < completed_below_) return;
  Credit& credit = this->credit(number);
  if (credit.complete) return;
  const uint32_t slot = credit_slot(number);
  for (; credit.acked_below < sack.first_missing; ++credit.acked_below) {
    if (credit.acked.test(credit.acked_below)) continue;
    credit.acked.set(credit.acked_below);
    recovery.on_acked(now_us, make_immediate(slot, credit.acked_below));
  }
  const uint32_t first_word = sack.first_missing / 64;
  for (uint32_t offset = 0; offset < sack.words.count() && first_word + offset < credit.acked.word_count(); ++offset) {
    const uint32_t index = first_word + offset;
    for (uint64_t fresh = sack.words[offset] & ~credit.acked.word(index); fresh != 0; fresh &= fresh - 1) {
      const uint32_t packet = index * 64 + static_cast<uint32_t>(std::countr_zero(fresh));
      if (packet >= credit.next_unsent) return;
      credit.acked.set(packet);
      recovery.on_acked(now_us, make_immediate(slot, packet));
    }
  }
}

void Sender::apply_acks(uint64_t now_us, const ControlReader& control, Recovery& recovery,
                        SequenceRing<Event>& events) {
  const uint64_t completed = nearest<32>(control.header().completed_below, completed_below_);
  for (uint64_t number = completed_below_; number < completed; ++number) complete(now_us, number, recovery, events);
  const WordView done = control.done();
  for (uint32_t index = 0; index < done.count(); ++index)
    for (uint64_t word = done[index]; word != 0; word &= word - 1) {
      const uint64_t number = completed + 1 + index * 64 + static_cast<uint32_t>(std::countr_zero(word));
      if (number >= completed_below_) complete(now_us, number, recovery, events);
    }
  completed_below_ = std::max(completed_below_, completed);
  control.each_sack([&](const Sack& sack) {
    apply_sack(now_us, sack, recovery);
    return true;
  });
}

bool Sender::apply_adverts(const ControlReader& control, SequenceRing<Event>& events) {
  if (control.header().advert_count == 0) return false;
  const uint64_t first = nearest<32>(control.header().advert_first, credits_seen_);
  adverts_end_ = std::max(adverts_end_, first + control.header().advert_count);
  control.each_advert([&](uint32_t index, const Advert& advert) {
    const uint64_t number = first + index;
    if (number == credits_seen_)
      accept(advert, events);
    else if (number > credits_seen_)
      early_.keep(number, advert);
    return true;
  });
  while (const Advert* next = early_.find(credits_seen_)) {
    uint64_t missing_bytes = this->missing_bytes();
    // The peer sends the adverts again, and that control is refused as a whole.
    if (!is_possible(*next, missing_bytes)) {
      early_.clear();
      break;
    }
    accept(*next, events);
  }
  return true;
}

void Sender::accept(const Advert& advert, SequenceRing<Event>& events) {
  const uint64_t number = credits_seen_++;
  credits_.cover(completed_below_, credits_seen_);
  if (advert.first_part) {
    const MessageHeader header{advert.key, advert.signature, advert.message_bytes};
    const uint64_t id = messages_.push(Message{header, 0, 0, 0, nullptr, number, number, false, false, false});
    events.push(Event{Event::Kind::advert, header, 0, id, nullptr, 0, nullptr});
  }
  const uint64_t id = messages_.end() - 1;
  Message& message = messages_[id];
  Credit& credit = this->credit(number);
  credit.message = id;
  credit.offset = message.advertised_bytes;
  credit.address = advert.address;
  credit.keys = advert.keys;
  credit.part_bytes = advert.part_bytes;
  credit.packet_count = std::max(1u, (advert.part_bytes + payload_max_bytes_ - 1) / payload_max_bytes_);
  credit.next_unsent = credit.acked_below = 0;
  credit.complete = false;
  credit.acked.reset(credit.packet_count);
  message.advertised_bytes += advert.part_bytes;
  message.end_credit = credits_seen_;
  if (message.bound || message.is_returned) send_credit(number);
}

void Sender::clear() {
  messages_.clear();
  to_send_.clear();
  completed_below_ = credits_seen_;
  open_transfers_ = 0;
  partial_credits_ = 0;
  adverts_end_ = credits_seen_;
  early_.clear();
}

}  // namespace sennit::flow
