// SPDX-License-Identifier: Apache-2.0
// The sending side of bulk messages: the peer's adverts, the transfers bound to them, and what is acknowledged.
//
// Credits are sent in the order in which their transfers were called, and their packets by index.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "flow/control.hpp"
#include "flow/flow.hpp"
#include "flow/immediate.hpp"
#include "flow/numbers.hpp"
#include "flow/receive_budget.hpp"
#include "flow/recovery.hpp"
#include "flow/sequence_ring.hpp"

namespace sennit::flow {

// Adverts that arrived before their predecessors. On several paths controls overtake each other all the time, and
// dropping an advert costs a round-trip time.
class EarlyAdverts {
 public:
  // `number` is less than CREDIT_WINDOW above the next number to be taken.
  void keep(uint64_t number, const Advert& advert) {
    if (cells_.empty()) cells_.resize(CREDIT_WINDOW);  // most flows on one path never need them
    cells_[number % CREDIT_WINDOW] = {number, advert};
  }
  // Null: it has not arrived.
  const Advert* find(uint64_t number) const {
    if (cells_.empty()) return nullptr;
    const Cell& cell = cells_[number % CREDIT_WINDOW];
    return cell.number == number ? &cell.advert : nullptr;
  }
  void clear() { cells_.clear(); }

 private:
  struct Cell {
    uint64_t number = UINT64_MAX;
    Advert advert{};
  };
  std::vector<Cell> cells_;
};

class Sender {
 public:
  explicit Sender(const FlowConfig& config);

  // `advert_id` is that of the event. Returns null on success, else what is wrong with the call.
  const char* transfer(uint64_t send_id, uint64_t advert_id, const std::byte* data, uint64_t size_bytes);
  // The oldest advert that no transfer has used. It may not be used any more. False: there is none among the older half
  // of the credits.
  bool give_back(Event& out);
  bool has_unsent() const;
  DataOut take_unsent();  // Call has_unsent() first.
  // The keys of the credit to which an unacknowledged packet belongs.
  const Keys& keys_of(uint32_t immediate) const;
  bool has_backlog() const { return !to_send_.empty(); }
  // There is more to send, and only the receiver's grant prevents it.
  bool is_out_of_grant() const { return is_within_reach() && sent_packets_ >= granted_packets_; }
  // The receiver limits what is in flight to it.
  bool is_granted_narrowly() const { return granted_packets_ - sent_packets_ < GRANT_UNLIMITED_PACKETS / 2; }
  uint64_t granted_packets() const { return granted_packets_; }
  // Not computed by nearest<32>, which would turn an old count from before the start into a huge one.
  void on_granted(uint32_t granted) {
    const auto more = static_cast<int32_t>(granted - static_cast<uint32_t>(granted_packets_));
    if (more > 0) granted_packets_ += static_cast<uint32_t>(more);
  }
  // Transfers that are not completely acknowledged.
  uint64_t open_transfers() const { return open_transfers_; }
  // Some credit of the peer is partly sent and not completely acknowledged.
  bool has_unacknowledged() const { return partial_credits_ != 0; }

  // Whether a control payload is consistent with what was sent. Must be true before any of it is applied.
  bool check(const ControlReader& control) const;
  // Apply first the acknowledgements, then the adverts. Both add events.
  void apply_acks(uint64_t now_us, const ControlReader& control, Recovery& recovery, SequenceRing<Event>& events);
  // True when new adverts came.
  bool apply_adverts(const ControlReader& control, SequenceRing<Event>& events);
  // Adverts arrived, but not all of their predecessors.
  bool has_advert_gap() const { return credits_seen_ < adverts_end_; }
  uint64_t credits_seen() const { return credits_seen_; }
  void clear();

 private:
  struct Message {
    MessageHeader header;
    uint64_t advertised_bytes, acknowledged_bytes;
    uint64_t send_id;
    const std::byte* data;
    uint64_t first_credit, end_credit;  // its parts so far
    bool bound;                         // transfer was called, or
    bool is_returned;                   // its credits go back: one empty packet for each
    bool sent;                          // all acknowledged
  };
  struct Credit {
    uint64_t message, offset, address;
    Keys keys;
    uint32_t part_bytes, packet_count;
    uint32_t next_unsent, acked_below;
    bool complete;
    Bitmap acked;
  };

  bool is_within_reach() const;
  // The bytes of the newest message that are not advertised yet.
  uint64_t missing_bytes() const;
  // Whether `advert` may come next while the newest message lacks `missing_bytes`. Subtracts the advert's part.
  bool is_possible(const Advert& advert, uint64_t& missing_bytes) const;
  void accept(const Advert& advert, SequenceRing<Event>& events);
  Credit& credit(uint64_t number) { return credits_[number]; }
  const Credit& credit(uint64_t number) const { return credits_[number]; }
  void send_credit(uint64_t number);
  void apply_sack(uint64_t now_us, const Sack& sack, Recovery& recovery);
  void complete(uint64_t now_us, uint64_t number, Recovery& recovery, SequenceRing<Event>& events);
  bool all_sent(uint64_t number) const {
    return number < credits_seen_ && credit(number).next_unsent == credit(number).packet_count;
  }

  const uint32_t payload_max_bytes_, peer_key_count_;
  SequenceRing<Message> messages_;  // by advert id
  SlidingRing<Credit> credits_;
  SequenceRing<uint64_t> to_send_;  // bound credits with packets never sent
  uint64_t completed_below_ = 0, credits_seen_ = 0;
  uint64_t sent_packets_ = 0, granted_packets_ = 0;  // for the first time; since the start
  uint64_t open_transfers_ = 0;
  uint32_t partial_credits_ = 0;
  uint64_t adverts_end_ = 0;  // after the newest advert that arrived, in order or not
  EarlyAdverts early_;
};

}  // namespace sennit::flow
