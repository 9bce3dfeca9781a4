// SPDX-License-Identifier: Apache-2.0
#include "flow/receiver.hpp"

#include <algorithm>
#include <utility>

namespace sennit::flow {
namespace {

// The number of controls that report a change of a credit, because a control may be lost. If the next control then left
// the credit out, its packets would look lost beside later packets of their path.
constexpr uint8_t SACK_REPORTS = 3;

}  // namespace

Receiver::Receiver(const FlowConfig& config) : payload_max_bytes_(config.payload_max_bytes) {}

void Receiver::advertise(uint64_t receive_id, const MessageHeader& header, std::byte* destination, const Keys& keys) {
  const bool is_asked = (header.key & P2P_KEY) != 0;
  waiting_.push(messages_.push(Message{receive_id, header, destination, keys, 0, 0, is_asked, false}));
  asked_waiting_ += is_asked;
  open_credits_in_window();
  was_short_ |= is_short();
}

void Receiver::ask(uint64_t receive_id) {
  for (uint64_t at = waiting_.first(); at != waiting_.end(); ++at) {
    Message& message = messages_[waiting_[at]];
    if (message.receive_id != receive_id) continue;
    asked_waiting_ += !std::exchange(message.is_asked, true);
    was_short_ = true;
  }
}

void Receiver::open_credits_in_window() {
  const uint64_t part_max_bytes =
      payload_max_bytes_ * std::min(CREDIT_MAX_PACKETS, ADVERT_PART_MASK / payload_max_bytes_);
  while (!waiting_.empty() && next_credit_ < completed_below_ + CREDIT_WINDOW) {
    const uint64_t number = waiting_.front();
    Message& message = messages_[number];
    const uint64_t left_bytes = message.header.size_bytes - message.bytes_opened;
    const auto part_bytes = static_cast<uint32_t>(std::min(left_bytes, part_max_bytes));
    credits_.cover(completed_below_, next_credit_ + 1);
    Credit& credit = this->credit(next_credit_++);
    credit.message = number;
    credit.offset = message.bytes_opened;
    credit.destination = message.destination + message.bytes_opened;
    credit.keys = message.keys;
    credit.part_bytes = part_bytes;
    // A message of size 0 is one packet of size 0.
    credit.packet_count = std::max(1u, (part_bytes + payload_max_bytes_ - 1) / payload_max_bytes_);
    opened_packets_ += credit.packet_count;
    credit.received = credit.first_missing = credit.received_end = 0;
    credit.reports_left = 0;
    credit.is_returned = false;
    credit.present.reset(credit.packet_count);
    message.bytes_opened += part_bytes;
    if (message.bytes_opened != message.header.size_bytes) continue;
    waiting_.pop();
    asked_waiting_ -= message.is_asked;
  }
}

uint64_t Receiver::credit_of(uint32_t immediate) const {
  const uint32_t slot_offset = slot_of(immediate) - 1;
  const uint32_t ahead = slot_offset >= completed_slot_offset_ ? slot_offset - completed_slot_offset_
                                                               : slot_offset + CREDIT_SLOTS - completed_slot_offset_;
  // The farther half of the cycle is in the past: this is a late copy of a packet of a complete credit.
  if (ahead >= CREDIT_SLOTS / 2) return completed_below_ + ahead - CREDIT_SLOTS;
  return completed_below_ + ahead;
}

uint32_t Receiver::packet_bytes(const Credit& credit, uint32_t index) const {
  return std::min(payload_max_bytes_, credit.part_bytes - index * payload_max_bytes_);
}

Placement Receiver::place(uint64_t number, uint32_t index) const {
  const Credit& credit = this->credit(number);
  std::byte* at = credit.destination + size_t{index} * payload_max_bytes_;
  return Placement{at, make_immediate(credit_slot(number), index), reinterpret_cast<uint64_t>(at),
                   packet_bytes(credit, index)};
}

Verdict Receiver::classify(uint32_t immediate, uint32_t size_bytes) const {
  const uint64_t number = credit_of(immediate);
  // Before the first credit, `number` has wrapped to a huge one.
  if (number >= next_credit_) return Verdict::bad_slot;
  if (number < completed_below_) return Verdict::duplicate;
  const Credit& credit = this->credit(number);
  const uint32_t index = index_of(immediate);
  if (is_return(credit, size_bytes) && index == 0 && was_short_ && (credit.received == 0 || credit.is_returned))
    return credit.is_returned ? Verdict::duplicate : Verdict::place;
  if (index >= credit.packet_count || size_bytes != packet_bytes(credit, index) || credit.is_returned)
    return Verdict::bad_range;
  return credit.present.test(index) ? Verdict::duplicate : Verdict::place;
}

Verdict Receiver::locate(uint32_t immediate, uint64_t address, uint32_t rkey, uint32_t size_bytes,
                         Placement& out) const {
  const Verdict verdict = classify(immediate, size_bytes);
  const uint64_t number = credit_of(immediate);
  if (verdict == Verdict::bad_slot) return verdict;
  if (number < completed_below_) {
    // The key is forgotten. Nothing is placed, so there is nothing to protect.
    out = Placement{nullptr, immediate, address, size_bytes};
    return verdict;
  }
  // If there are several keys, only the devices know which is whose, and they check it.
  if (rkey != credit(number).keys.of[0]) return Verdict::bad_key;
  if (verdict == Verdict::bad_range) return verdict;
  const Placement expected = place(number, index_of(immediate));
  if (address != expected.address) return Verdict::bad_range;
  out = expected;
  if (verdict == Verdict::duplicate || is_return(credit(number), size_bytes)) out.destination = nullptr;
  return verdict;
}

void Receiver::touch(uint64_t number) {
  Credit& credit = this->credit(number);
  if (credit.reports_left == 0) touched_.push_back(number);
  credit.reports_left = SACK_REPORTS;
}

Receiver::Arrival Receiver::on_data(uint32_t immediate, uint32_t size_bytes, SequenceRing<Event>& events) {
  const uint64_t number = credit_of(immediate);
  const uint32_t index = index_of(immediate);
  Credit& credit = this->credit(number);
  if (is_return(credit, size_bytes)) {
    credit.is_returned = messages_[credit.message].is_returned = true;
    credit.received = credit.packet_count;
    ++received_packets_;
    opened_packets_ -= credit.packet_count - 1;
    on_seen_below(number + 1);
    return {true, on_complete(number, events), true, number};
  }
  credit.present.set(index);
  Arrival arrival{index == credit.received_end, false, index + 1 == credit.packet_count, number};
  ++received_packets_;
  if (++credit.received == 1) ++partial_credits_;
  if (index >= credit.received_end) credit.received_end = index + 1;
  while (credit.first_missing < credit.received_end && credit.present.test(credit.first_missing))
    ++credit.first_missing;
  cursor_credit_ = number;
  cursor_index_ = index + 1;
  // Data for a credit shows that its advert, and so all adverts before it, arrived.
  on_seen_below(number + 1);
  if (!complete(credit)) {
    touch(number);
    return arrival;
  }

  --partial_credits_;
  arrival.message_complete = on_complete(number, events);
  return arrival;
}

// Returns whether the message is complete, too.
bool Receiver::on_complete(uint64_t number, SequenceRing<Event>& events) {
  Credit& credit = this->credit(number);
  Message& message = messages_[credit.message];
  message.bytes_complete += credit.part_bytes;
  const bool is_whole = message.bytes_complete == message.header.size_bytes;
  if (is_whole) {
    const auto kind = message.is_returned ? Event::Kind::returned : Event::Kind::received;
    events.push(Event{kind, message.header, 0, message.receive_id, message.destination, 0, nullptr});
  }
  while (completed_below_ < next_credit_ && complete(this->credit(completed_below_))) {
    // Parts are in message order, so the last part of a message frees its record.
    const Credit& done = this->credit(completed_below_);
    if (done.offset + done.part_bytes == messages_[done.message].header.size_bytes) messages_.pop();
    ++completed_below_;
    if (++completed_slot_offset_ == CREDIT_SLOTS) completed_slot_offset_ = 0;
  }
  open_credits_in_window();
  return is_whole;
}

void Receiver::report_all() {
  for (uint64_t number = completed_below_; number < next_credit_; ++number)
    if (credit(number).received != 0 && !complete(credit(number))) touch(number);
}

void Receiver::on_duplicate(uint32_t immediate) {
  const uint64_t number = credit_of(immediate);
  if (number >= completed_below_ && number < next_credit_ && !complete(credit(number))) touch(number);
}

size_t Receiver::predict(std::span<Placement> out) const {
  const uint64_t number = std::max(cursor_credit_, completed_below_);
  return missing_from(number, number == cursor_credit_ ? cursor_index_ : 0, out);
}

size_t Receiver::predict_from(uint32_t immediate, std::span<Placement> out) const {
  if (slot_of(immediate) == EAGER_SLOT) return 0;
  const uint64_t number = credit_of(immediate);
  // Before the first credit, `number` may have wrapped to a huge one.
  if (number < completed_below_ || number >= next_credit_) return 0;
  return missing_from(number, index_of(immediate), out);
}

size_t Receiver::missing_from(uint64_t number, uint32_t index, std::span<Placement> out) const {
  size_t count = 0;
  // Skips packets that are already there, but not many: after a retransmission the prediction is poor anyway.
  size_t looks = out.size() + 64;
  for (; number < next_credit_ && count < out.size(); ++number, index = 0) {
    const Credit& credit = this->credit(number);
    if (complete(credit)) continue;
    for (; index < credit.packet_count && count < out.size(); ++index) {
      if (looks-- == 0) return count;
      if (!credit.present.test(index)) out[count++] = place(number, index);
    }
  }
  return count;
}

bool Receiver::check_seen(const ControlHeader& header) const {
  return nearest<32>(header.credits_seen, seen_below_) <= next_credit_;
}

bool Receiver::on_seen_below(uint64_t number) {
  if (number <= seen_below_) return false;
  seen_below_ = number;
  unsent_advert_ = std::max(unsent_advert_, number);
  return true;
}

void Receiver::write_done(ControlWriter& writer) const {
  writer.header.completed_below = static_cast<uint32_t>(completed_below_);
  uint64_t words[CREDIT_WINDOW_WORDS] = {};
  uint32_t word_count = 0;
  for (uint64_t number = completed_below_ + 1; number < next_credit_; ++number) {
    if (!complete(credit(number))) continue;
    const auto bit = static_cast<uint32_t>(number - completed_below_ - 1);
    words[bit / 64] |= uint64_t{1} << (bit % 64);
    word_count = bit / 64 + 1;
  }
  for (uint32_t index = 0; index < word_count; ++index) writer.add_done_word(words[index]);
}

void Receiver::write_sacks(ControlWriter& writer) {
  size_t kept = 0;
  sacks_postponed_ = false;
  for (const uint64_t number : touched_) {
    if (number < completed_below_) continue;
    Credit& credit = this->credit(number);
    if (complete(credit)) {
      credit.reports_left = 0;
      continue;
    }
    const uint32_t first_word = credit.first_missing / 64;
    const uint32_t end_word = (credit.received_end + 63) / 64;
    const uint32_t words =
        credit.received_end > credit.first_missing ? std::min(end_word - first_word, SACK_MAX_WORDS) : 0;
    if (writer.begin_sack(static_cast<uint32_t>(number), credit.first_missing, words)) {
      for (uint32_t index = 0; index < words; ++index) writer.add_sack_word(credit.present.word(first_word + index));
      if (--credit.reports_left == 0) continue;
    } else {
      sacks_postponed_ |= credit.reports_left == SACK_REPORTS;
    }
    touched_[kept++] = number;
  }
  touched_.resize(kept);
  // Credits that did not fit go first next time, because the others were only repeated.
  if (sacks_postponed_)
    std::stable_partition(touched_.begin(), touched_.end(),
                          [&](uint64_t number) { return credit(number).reports_left == SACK_REPORTS; });
}

void Receiver::write_adverts(ControlWriter& writer, uint64_t now_us) {
  writer.header.advert_first = static_cast<uint32_t>(unsent_advert_);
  for (; unsent_advert_ < next_credit_; ++unsent_advert_) {
    Credit& credit = this->credit(unsent_advert_);
    const MessageHeader* header = credit.offset == 0 ? &messages_[credit.message].header : nullptr;
    const Advert advert{reinterpret_cast<uint64_t>(credit.destination),
                        credit.keys,
                        credit.part_bytes,
                        header != nullptr,
                        header ? header->key : 0,
                        header ? header->signature : 0,
                        header ? header->size_bytes : 0};
    if (!writer.add_advert(advert)) return;
    credit.advert_sent_us = now_us;
  }
}

void Receiver::clear() {
  messages_.clear();
  waiting_.clear();
  touched_.clear();
  asked_waiting_ = 0;
  completed_below_ = seen_below_ = unsent_advert_ = cursor_credit_ = next_credit_;
  completed_slot_offset_ = static_cast<uint32_t>(completed_below_ % CREDIT_SLOTS);
  partial_credits_ = 0;
}

}  // namespace sennit::flow
