// SPDX-License-Identifier: Apache-2.0
// All messages from one rank to the other, as an observer of both sides knows them: their bytes, which of their packets
// have arrived, and what may still happen to them.
#pragma once
#include <array>
#include <bitset>
#include <cstdint>
#include <vector>

#include "flow/flow.hpp"
#include "model/network.hpp"
#include "model/schedule.hpp"

namespace sennit::model {

class Direction {
 public:
  Direction();
  void begin(const Schedule& schedule, uint32_t sender, std::byte* eager_memory, uint32_t eager_rkey);

  uint32_t count() const { return draw_->message_count; }
  const MessageDraw& draw(uint32_t message) const { return draw_->messages[message]; }
  MessageHeader header(uint32_t message) const;
  uint32_t rkey(uint32_t message) const;
  // For send_eager and transfer. Fills it with the message's bytes.
  const std::byte* fill_source(uint32_t message);
  std::byte* prepare_destination(uint32_t message);

  // The sender's program.
  void on_eager_pushed(uint32_t message);
  void on_advert(uint32_t message, const MessageHeader& header);  // the event
  bool has_advert(uint32_t message) const { return states_[message].advert_seen; }
  void on_transfer(uint32_t message) { states_[message].transferred = true; }
  void on_sent(uint64_t message);  // the event
  // Checks a packet that the flow gave out, and reports what is wrong with it. Fills in which packet it is.
  void on_packet_out(const flow::DataOut& data, Packet& packet);
  // All packets of the message are acknowledged, so they must have arrived. (Eager messages have no event for it.)
  void check_all_delivered() const;

  // The receiver's port.
  bool is_delivered(const Packet& packet) const { return states_[packet.message].delivered[packet.part]; }
  void check_destination(const std::byte* at, uint32_t size_bytes) const;
  void on_delivered(const Packet& packet);
  // The receiver's program.
  void on_received(uint64_t message, const std::byte* data);
  void on_eager(uint32_t message, const flow::Event& event) const;
  bool is_received(uint32_t message) const { return states_[message].received; }

  // The receiver or the sender has ended, so its memory does not belong to the flow any more.
  void close_destinations();
  void close_sources();
  // Bytes around the destinations.
  void check_guards() const;

  uint64_t distinct_packets_out() const { return distinct_packets_out_; }
  uint64_t distinct_packets_delivered() const { return distinct_packets_delivered_; }
  // Whether a message of one credit is in progress for either side, judged by what was seen on the wire.
  bool is_sending() const;
  bool is_receiving() const;

 private:
  struct State {
    uint32_t start;  // in both arenas
    uint32_t packet_count;
    uint64_t eager_number;
    bool pushed, advertised, advert_seen, transferred, sent, received;
    std::bitset<MESSAGE_MAX_PACKETS> out, delivered;
  };
  uint32_t size_bytes(uint32_t message) const { return draw_->messages[message].size_bytes; }
  uint32_t message_at(const std::byte* base, const std::byte* at) const;
  uint64_t word(uint32_t message, uint32_t index) const;
  bool has_right_bytes(uint32_t message, const std::byte* data) const;
  void put_guard(uint32_t at);

  const RankDraw* draw_ = nullptr;
  uint64_t content_seed_ = 0;
  uint32_t sender_ = 0, payload_max_bytes_ = 0, eager_slot_count_ = 0;
  std::byte* eager_memory_ = nullptr;
  uint32_t eager_rkey_ = 0;
  uint64_t eager_pushed_ = 0;
  bool sources_closed_ = false, destinations_closed_ = false;
  uint64_t distinct_packets_out_ = 0, distinct_packets_delivered_ = 0;
  uint32_t used_bytes_ = 0;
  std::array<State, MESSAGES_MAX> states_{};
  std::vector<std::byte> source_, destination_;
};

}  // namespace sennit::model
