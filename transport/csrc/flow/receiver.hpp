// SPDX-License-Identifier: Apache-2.0
// The receiving side of bulk messages: credits, their bitmaps, and their part of the control payload.
//
// A message is cut into parts of at most CREDIT_MAX_PACKETS packets. Each part is one credit. At most CREDIT_WINDOW
// credits are open, counted from the oldest incomplete one. The others wait in call order.
//
// So a message that its sender gets to late would in the end hold up those that the sender waits to send. It has asked
// for these: for a point-to-point message before it is advertised, for one of a collective after a while (ask()). As
// long as such a message waits, is_short() has the peer give back old credits that it does not use yet: it sends an
// empty packet in place of the data. The message is not received then, and is to be advertised anew.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "flow/control.hpp"
#include "flow/flow.hpp"
#include "flow/immediate.hpp"
#include "flow/sequence_ring.hpp"

namespace sennit::flow {

class Receiver {
 public:
  explicit Receiver(const FlowConfig& config);

  void advertise(uint64_t receive_id, const MessageHeader& header, std::byte* destination, const Keys& keys);

  // The sender waits to send the message.
  void ask(uint64_t receive_id);

  Verdict locate(uint32_t immediate, uint64_t address, uint32_t rkey, uint32_t size_bytes, Placement& out) const;
  // The checks of `locate` that need no RETH, because a completion does not show it.
  Verdict classify(uint32_t immediate, uint32_t size_bytes) const;
  struct Arrival {
    bool in_order;
    bool message_complete;
    bool is_last_packet;  // of its credit: packets that are still missing were lost or are on another path
    uint64_t credit;
  };
  // Call it after classify said `place`. A complete message adds its event to `events`.
  Arrival on_data(uint32_t immediate, uint32_t size_bytes, SequenceRing<Event>& events);
  // The sender repeated a packet, so the state of its credit goes into the next control again.
  void on_duplicate(uint32_t immediate);
  // Makes the next control report every open credit.
  void report_all();
  // Places of the next packets: after the newest arrival, or from the packet that `immediate` names.
  size_t predict(std::span<Placement> out) const;
  size_t predict_from(uint32_t immediate, std::span<Placement> out) const;

  // False: the peer claims to have seen more adverts than there are.
  bool check_seen(const ControlHeader& header) const;
  // True when the peer has seen more than before.
  bool on_seen(const ControlHeader& header) { return on_seen_below(nearest<32>(header.credits_seen, seen_below_)); }
  void resend_adverts() { unsent_advert_ = seen_below_; }
  bool has_unsent_adverts() const { return unsent_advert_ < next_credit_; }
  bool has_unseen_adverts() const { return seen_below_ < next_credit_; }
  // When the oldest of them was last sent. 0: not yet.
  uint64_t oldest_unseen_sent_us() const { return credit(seen_below_).advert_sent_us; }
  // Whether a part of a bulk message has arrived and a part is missing.
  bool has_partial() const { return partial_credits_ != 0; }
  // A message that its sender has asked for has no credit.
  bool is_short() const { return asked_waiting_ != 0; }
  bool has_open() const { return completed_below_ < next_credit_ || !waiting_.empty(); }

  // In the order of the byte table: done words, then (after the eager part) SACKs, then adverts.
  void write_done(ControlWriter& writer) const;
  void write_sacks(ControlWriter& writer);
  // Some did not fit, so another control follows at once.
  bool has_postponed_sacks() const { return sacks_postponed_; }
  void write_adverts(ControlWriter& writer, uint64_t now_us);
  void clear();
  // Since the start: the packets of all credits opened so far, and how many of them have arrived.
  uint64_t opened_packets() const { return opened_packets_; }
  uint64_t received_packets() const { return received_packets_; }
  uint64_t open_credits() const { return next_credit_ - completed_below_; }

 private:
  struct Message {
    uint64_t receive_id;
    MessageHeader header;
    std::byte* destination;
    Keys keys;
    uint64_t bytes_opened, bytes_complete;
    bool is_asked;     // its sender waits to send it
    bool is_returned;  // some of its credits came back, and the others will
  };
  struct Credit {
    uint64_t message;
    uint64_t offset;  // of the part in its message
    std::byte* destination;
    Keys keys;
    uint32_t part_bytes, packet_count;
    uint32_t received, first_missing, received_end;
    uint64_t advert_sent_us;
    uint8_t reports_left;  // reported in this many further controls; the credit is in touched_ while this is not 0
    bool is_returned;
    Bitmap present;
  };

  Credit& credit(uint64_t number) { return credits_[number]; }
  const Credit& credit(uint64_t number) const { return credits_[number]; }
  uint64_t credit_of(uint32_t immediate) const;
  bool complete(const Credit& credit) const { return credit.received == credit.packet_count; }
  static bool is_return(const Credit& credit, uint32_t size_bytes) { return size_bytes == 0 && credit.part_bytes != 0; }
  uint32_t packet_bytes(const Credit& credit, uint32_t index) const;
  Placement place(uint64_t number, uint32_t index) const;
  size_t missing_from(uint64_t number, uint32_t index, std::span<Placement> out) const;
  void open_credits_in_window();
  bool on_complete(uint64_t number, SequenceRing<Event>& events);
  bool on_seen_below(uint64_t number);
  void touch(uint64_t number);

  const uint32_t payload_max_bytes_;
  SequenceRing<Message> messages_;
  SequenceRing<uint64_t> waiting_;  // messages with parts that have no credit yet
  SlidingRing<Credit> credits_;
  uint64_t completed_below_ = 0, next_credit_ = 0;
  uint64_t seen_below_ = 0, unsent_advert_ = 0;
  uint32_t completed_slot_offset_ = 0;  // completed_below_ % CREDIT_SLOTS
  uint32_t partial_credits_ = 0;
  uint64_t opened_packets_ = 0, received_packets_ = 0;
  std::vector<uint64_t> touched_;  // credits whose state the peer should learn
  bool sacks_postponed_ = false;
  uint64_t asked_waiting_ = 0;  // messages of waiting_ that their sender has asked for
  bool was_short_ = false;
  uint64_t cursor_credit_ = 0;  // after the newest arrival: where predict starts
  uint32_t cursor_index_ = 0;
};

}  // namespace sennit::flow
