// SPDX-License-Identifier: Apache-2.0
// The eager stream: small messages, one packet each, copied into a ring at the receiver and taken in order.
//
// Packet n goes to slot n % slot_count of the peer's ring. The sender keeps its own ring of the same size for
// retransmission. Both slots are free again once the peer's message layer has consumed packet n.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "flow/control.hpp"
#include "flow/flow.hpp"
#include "flow/sequence_ring.hpp"

namespace sennit::flow {

// An eager message takes one slot of the ring, however large bulk packets are.
inline constexpr uint32_t EAGER_SLOT_MAX_BYTES = 4'096;
inline uint32_t eager_slot_bytes(const FlowConfig& config) {
  return std::min(config.payload_max_bytes, EAGER_SLOT_MAX_BYTES);
}

class EagerSender {
 public:
  explicit EagerSender(const FlowConfig& config);
  void set_remote(uint64_t address, uint32_t rkey);
  uint64_t max_bytes() const { return slot_bytes_ - EAGER_HEADER_BYTES; }
  // False: the peer has not consumed enough yet.
  bool push(const MessageHeader& header, uint32_t flags, const void* data);
  bool has_unsent() const { return sent_ != next_; }
  DataOut take_unsent();
  // A push was refused, and since then the peer has consumed nothing.
  bool is_waiting() const { return blocked_; }
  bool all_received() const { return received_below_ == next_; }
  void clear();

  // False: the peer acknowledges packets that were never sent.
  bool check(const ControlHeader& header) const;
  // Calls `acked(packet number)` for each packet that has arrived. It may repeat packets.
  template <typename Acked>
  void apply(const ControlHeader& header, const WordView& above, Acked acked);

 private:
  uint64_t received_by(const ControlHeader& header) const;
  uint64_t consumed_by(const ControlHeader& header) const;
  const uint32_t slot_bytes_, slot_count_;
  const std::unique_ptr<std::byte[]> ring_;  // not zeroed: a flow without eager messages touches no page
  std::vector<uint32_t> sizes_;
  uint64_t remote_address_ = 0;
  uint32_t rkey_ = 0;
  uint64_t next_ = 0, sent_ = 0;                      // next message, next packet to send the first time
  uint64_t received_below_ = 0, consumed_below_ = 0;  // as the peer reports
  bool blocked_ = false;
};

class EagerReceiver {
 public:
  EagerReceiver(const FlowConfig& config, std::span<std::byte> memory, uint32_t rkey);
  Verdict locate(uint32_t index, uint64_t address, uint32_t rkey, uint32_t size_bytes, Placement& out) const;
  // The checks that are possible for a completion without RETH.
  Verdict classify(uint32_t index, uint32_t size_bytes) const;
  // The same once the packet is in its place: only its header tells it from a copy that is 2^INDEX_BITS packets late.
  Verdict classify_placed(uint32_t index, uint32_t size_bytes) const;
  // Call it after classify_placed said `place`. True if the packet was the next one in order.
  bool on_data(uint32_t index, uint32_t size_bytes);

  enum class Taken : uint8_t { none, message, malformed };
  // The next message in order. Only now is the one before it consumed.
  Taken take(Event& out);
  void consume();  // the message taken last
  void defer();    // The message could not be used: offer it again.
  uint64_t consumed_below() const { return consumed_below_; }
  bool has_undelivered() const { return consumed_below_ != received_below_; }
  void write_state(ControlWriter& writer) const;

 private:
  uint64_t packet(uint32_t index) const;
  std::byte* slot(uint64_t packet) const;
  const uint32_t slot_bytes_, slot_count_, rkey_;
  std::span<std::byte> memory_;
  Bitmap present_;  // by slot: arrived and not consumed
  std::vector<uint32_t> sizes_;
  uint64_t received_below_ = 0, received_end_ = 0, consumed_below_ = 0;
  bool offered_ = false;  // packet consumed_below_ is at the message layer
};

template <typename Acked>
void EagerSender::apply(const ControlHeader& header, const WordView& above, Acked acked) {
  const uint64_t received = received_by(header);
  if (received < received_below_) return;  // this is an old control packet
  for (; received_below_ < received; ++received_below_) acked(received_below_);
  for (uint32_t index = 0; index < above.count(); ++index)
    for (uint64_t word = above[index]; word != 0; word &= word - 1) {
      const uint64_t packet = received + 1 + index * 64 + static_cast<uint32_t>(__builtin_ctzll(word));
      if (packet < sent_) acked(packet);
    }
  if (const uint64_t consumed = consumed_by(header); consumed > consumed_below_) {
    consumed_below_ = consumed;
    blocked_ = false;
  }
}

}  // namespace sennit::flow
