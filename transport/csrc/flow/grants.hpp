// SPDX-License-Identifier: Apache-2.0
// The receiving side of a flow's credit: how many bulk packets its sender may have sent, counted from the start.
//
// The count is cumulative and travels in every control, so that a control may be lost, doubled or overtaken.
// Retransmissions take no grant: what was lost is still granted and not received, so in flight is never more.
#pragma once
#include <algorithm>
#include <cstdint>

#include "flow/receive_budget.hpp"

namespace sennit::flow {

// Without a budget: ahead of what was received by more than any window.
inline constexpr uint64_t GRANT_UNLIMITED_PACKETS = uint64_t{1} << 30;

class Grants {
 public:
  Grants(ReceiveBudget* budget, uint32_t payload_max_bytes) : budget_(budget), payload_max_bytes_(payload_max_bytes) {}
  ~Grants() { clear(); }
  Grants(const Grants&) = delete;
  Grants& operator=(const Grants&) = delete;

  void on_advertised(uint64_t opened_packets) {
    opened_ = opened_packets;
    note_expecting();
  }
  void on_arrival(uint64_t now_us, bool ecn_marked) {
    if (budget_ == nullptr) return;
    arrived_us_ = now_us;
    budget_->on_arrival(account_, now_us, payload_max_bytes_, ecn_marked);
    // A sender that takes more than it was granted gets no more for it.
    if (++received_ <= granted_)
      budget_->on_settled(account_, payload_max_bytes_);
    else
      granted_ = received_;
    note_expecting();
  }
  // Asked after an arrival: a control should tell of a larger grant now, for the sender has used half of what it had,
  // or all and waits.
  bool is_due() {
    if (budget_ == nullptr || granted_ == opened_) return false;
    const uint64_t share = share_packets();
    const uint64_t outstanding = granted_ - received_;
    if (outstanding > share / 2) return false;
    return extension(true) >= (outstanding == 0 ? 1 : std::max<uint64_t>(share / 4, 1));
  }
  // The count for the next control; extended as far as the budget goes.
  uint32_t issue(uint64_t now_us, uint64_t received_packets, uint64_t smoothed_rtt_us) {
    if (budget_ == nullptr) return static_cast<uint32_t>(received_packets + GRANT_UNLIMITED_PACKETS);
    account_.idle_us = std::max(2 * smoothed_rtt_us, IDLE_MIN_US);
    budget_->look(now_us);
    const bool is_live = received_ != 0 && now_us < arrived_us_ + account_.idle_us;
    const uint64_t wanted = is_live ? room() : 0;
    const uint64_t more = extension(is_live);
    granted_ += more;
    budget_->on_granted(account_, now_us, more * payload_max_bytes_, wanted * payload_max_bytes_);
    return static_cast<uint32_t>(granted_);
  }
  void on_queue_report(uint64_t queue_us) {
    if (budget_ != nullptr) budget_->on_queue_report(queue_us);
  }
  void clear() {
    if (budget_ == nullptr) return;
    budget_->on_settled(account_, (granted_ - received_) * payload_max_bytes_);
    opened_ = granted_ = received_;
    note_expecting();
  }

 private:
  // However many senders there are, each goes on: its arrivals bring the next grant.
  static constexpr uint64_t LEAST_PACKETS = 2;

  // A few round trips of a data centre, so that what is only late is not taken for idle.
  static constexpr uint64_t IDLE_MIN_US = 1'000;

  // (Kept, because it is asked for with each arrival and changes once a round.)
  uint64_t share_packets() {
    if (share_version_ != budget_->share_version()) {
      share_version_ = budget_->share_version();
      share_packets_ = std::max(budget_->share_bytes() / payload_max_bytes_, LEAST_PACKETS);
    }
    return share_packets_;
  }
  // What its share leaves; nothing for a sender that sits on what it has.
  uint64_t room() {
    if (account_.is_parked) return 0;
    const uint64_t target = std::min(opened_, received_ + share_packets());
    return target > granted_ ? target - granted_ : 0;
  }
  uint64_t extension(bool is_live) {
    const uint64_t room = this->room();
    const uint64_t bytes = is_live ? budget_->grantable_bytes() : budget_->grantable_unseen_bytes();
    if (room * payload_max_bytes_ <= bytes) return room;
    const uint64_t outstanding = granted_ - received_;
    const uint64_t least = outstanding < LEAST_PACKETS ? LEAST_PACKETS - outstanding : 0;
    return std::min(room, std::max(bytes / payload_max_bytes_, least));
  }
  void note_expecting() {
    if (budget_ == nullptr || (opened_ > received_) == expecting_) return;
    expecting_ = !expecting_;
    budget_->on_expecting(account_, expecting_);
  }

  ReceiveBudget* const budget_;
  const uint32_t payload_max_bytes_;
  uint64_t opened_ = 0, granted_ = 0, received_ = 0;  // bulk packets since the start
  uint64_t arrived_us_ = 0;
  uint64_t share_packets_ = 0, share_version_ = UINT64_MAX;
  ReceiveBudget::Account account_;
  bool expecting_ = false;
};

}  // namespace sennit::flow
