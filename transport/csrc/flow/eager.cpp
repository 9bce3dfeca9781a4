// SPDX-License-Identifier: Apache-2.0
#include "flow/eager.hpp"

#include <cstring>

#include "flow/immediate.hpp"

namespace sennit::flow {
namespace {

// The header before an eager packet's data (docs/reference/wire.md, Flow).
struct EagerHeader {
  uint64_t key, signature, size_bytes;
  uint32_t flags_and_lap, data_bytes;
};
static_assert(sizeof(EagerHeader) == EAGER_HEADER_BYTES);

uint32_t eager_immediate(uint64_t packet) {
  return make_immediate(EAGER_SLOT, static_cast<uint32_t>(packet) & INDEX_MASK);
}

// The bits of a packet's number that its immediate lacks, above the flag.
uint32_t lap_of(uint64_t packet) { return static_cast<uint32_t>(packet >> INDEX_BITS) << 1; }

}  // namespace

EagerSender::EagerSender(const FlowConfig& config)
    : slot_bytes_(eager_slot_bytes(config)),
      slot_count_(config.eager_slot_count),
      ring_(std::make_unique_for_overwrite<std::byte[]>(size_t{config.eager_slot_count} * slot_bytes_)),
      sizes_(config.eager_slot_count) {}

void EagerSender::set_remote(uint64_t address, uint32_t rkey) {
  remote_address_ = address;
  rkey_ = rkey;
}

bool EagerSender::push(const MessageHeader& header, uint32_t flags, const void* data) {
  if (next_ - consumed_below_ == slot_count_) {
    blocked_ = true;
    return false;
  }
  const uint32_t data_bytes = flags == EAGER_REQUEST ? 0 : static_cast<uint32_t>(header.size_bytes);
  const EagerHeader head{header.key, header.signature, header.size_bytes, lap_of(next_) | flags, data_bytes};
  const uint32_t slot = static_cast<uint32_t>(next_) & (slot_count_ - 1);
  std::byte* at = ring_.get() + size_t{slot} * slot_bytes_;
  std::memcpy(at, &head, sizeof head);
  if (data_bytes != 0) std::memcpy(at + sizeof head, data, data_bytes);
  sizes_[slot] = EAGER_HEADER_BYTES + data_bytes;
  ++next_;
  return true;
}

DataOut EagerSender::take_unsent() {
  const uint32_t slot = static_cast<uint32_t>(sent_) & (slot_count_ - 1);
  const size_t offset = size_t{slot} * slot_bytes_;
  const DataOut packet{remote_address_ + offset, rkey_, eager_immediate(sent_), ring_.get() + offset, sizes_[slot]};
  ++sent_;
  return packet;
}

void EagerSender::clear() {
  received_below_ = consumed_below_ = sent_ = next_;
  blocked_ = false;
}

uint64_t EagerSender::received_by(const ControlHeader& header) const {
  return nearest<32>(header.eager_received, received_below_);
}
uint64_t EagerSender::consumed_by(const ControlHeader& header) const {
  return nearest<32>(header.eager_consumed, consumed_below_);
}

bool EagerSender::check(const ControlHeader& header) const {
  const uint64_t received = received_by(header), consumed = consumed_by(header);
  return received <= sent_ && consumed <= received && header.eager_words <= (slot_count_ + 63) / 64;
}

EagerReceiver::EagerReceiver(const FlowConfig& config, std::span<std::byte> memory, uint32_t rkey)
    : slot_bytes_(eager_slot_bytes(config)),
      slot_count_(config.eager_slot_count),
      rkey_(rkey),
      memory_(memory),
      sizes_(config.eager_slot_count) {
  present_.reset(slot_count_);
}

uint64_t EagerReceiver::packet(uint32_t index) const { return nearest<INDEX_BITS>(index, received_below_); }

std::byte* EagerReceiver::slot(uint64_t packet) const {
  return memory_.data() + size_t{static_cast<uint32_t>(packet) & (slot_count_ - 1)} * slot_bytes_;
}

Verdict EagerReceiver::classify(uint32_t index, uint32_t size_bytes) const {
  const uint64_t packet = this->packet(index);
  // Before the stream's start, `packet` has wrapped to a huge number.
  if (packet >= consumed_below_ + slot_count_) return Verdict::bad_slot;
  if (size_bytes < EAGER_HEADER_BYTES || size_bytes > slot_bytes_) return Verdict::bad_range;
  if (packet < received_below_ || present_.test(static_cast<uint32_t>(packet) & (slot_count_ - 1)))
    return Verdict::duplicate;
  return Verdict::place;
}

Verdict EagerReceiver::classify_placed(uint32_t index, uint32_t size_bytes) const {
  const Verdict verdict = classify(index, size_bytes);
  if (verdict != Verdict::place) return verdict;
  const uint64_t packet = this->packet(index);
  EagerHeader head;
  std::memcpy(&head, slot(packet), sizeof head);
  return (head.flags_and_lap & ~1u) == lap_of(packet) ? Verdict::place : Verdict::bad_slot;
}

Verdict EagerReceiver::locate(uint32_t index, uint64_t address, uint32_t rkey, uint32_t size_bytes,
                              Placement& out) const {
  const Verdict verdict = classify(index, size_bytes);
  if (verdict == Verdict::bad_slot) return verdict;
  if (rkey != rkey_) return Verdict::bad_key;
  std::byte* place = slot(packet(index));
  if (verdict == Verdict::bad_range || address != reinterpret_cast<uint64_t>(place)) return Verdict::bad_range;
  out = Placement{verdict == Verdict::place ? place : nullptr, make_immediate(EAGER_SLOT, index), address, size_bytes};
  return verdict;
}

bool EagerReceiver::on_data(uint32_t index, uint32_t size_bytes) {
  const uint64_t packet = this->packet(index);
  const uint32_t slot = static_cast<uint32_t>(packet) & (slot_count_ - 1);
  present_.set(slot);
  sizes_[slot] = size_bytes;
  const bool in_order = packet == received_end_;
  if (packet >= received_end_) received_end_ = packet + 1;
  while (received_below_ < received_end_ && present_.test(static_cast<uint32_t>(received_below_) & (slot_count_ - 1)))
    ++received_below_;
  return in_order;
}

EagerReceiver::Taken EagerReceiver::take(Event& out) {
  if (consumed_below_ == received_below_) return Taken::none;
  const std::byte* at = slot(consumed_below_);
  EagerHeader head;
  std::memcpy(&head, at, sizeof head);
  const uint32_t flags = head.flags_and_lap & 1;
  const uint32_t sent_bytes = sizes_[static_cast<uint32_t>(consumed_below_) & (slot_count_ - 1)] - EAGER_HEADER_BYTES;
  if (head.data_bytes != sent_bytes || head.data_bytes != (flags == EAGER_REQUEST ? 0 : head.size_bytes))
    return Taken::malformed;
  out = Event{Event::Kind::eager,
              {head.key, head.signature, head.size_bytes},
              flags,
              0,
              at + EAGER_HEADER_BYTES,
              head.data_bytes,
              nullptr};
  offered_ = true;
  return Taken::message;
}

void EagerReceiver::consume() {
  if (!offered_) return;
  offered_ = false;
  present_.clear(static_cast<uint32_t>(consumed_below_) & (slot_count_ - 1));
  ++consumed_below_;
}

void EagerReceiver::defer() { offered_ = false; }

void EagerReceiver::write_state(ControlWriter& writer) const {
  writer.header.eager_received = static_cast<uint32_t>(received_below_);
  writer.header.eager_consumed = static_cast<uint32_t>(consumed_below_);
  for (uint64_t packet = received_below_ + 1; packet < received_end_; packet += 64) {
    uint64_t word = 0;
    for (uint64_t bit = 0; bit < 64 && packet + bit < received_end_; ++bit)
      if (present_.test(static_cast<uint32_t>(packet + bit) & (slot_count_ - 1))) word |= uint64_t{1} << bit;
    writer.add_eager_word(word);
  }
}

}  // namespace sennit::flow
