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
  void on_arrival(bool ecn_marked) {
    if (budget_ == nullptr) return;
    budget_->on_arrival(payload_max_bytes_, ecn_marked);
    // A sender that takes more than it was granted gets no more for it.
    if (++received_ <= granted_)
      budget_->on_settled(payload_max_bytes_);
    else
      granted_ = received_;
    note_expecting();
  }
  // A control should tell of a larger grant now: the sender has used half of what it had.
  bool is_due() const {
    if (budget_ == nullptr || granted_ == opened_) return false;
    const uint64_t share = share_packets();
    return granted_ - received_ <= share / 2 && extension() >= std::max<uint64_t>(share / 4, 1);
  }
  // The count for the next control; extended as far as the budget goes.
  uint32_t issue(uint64_t received_packets) {
    if (budget_ == nullptr) return static_cast<uint32_t>(received_packets + GRANT_UNLIMITED_PACKETS);
    const uint64_t more = extension();
    granted_ += more;
    budget_->on_granted(more * payload_max_bytes_);
    return static_cast<uint32_t>(granted_);
  }
  void on_queue_report(uint64_t queue_us) {
    if (budget_ != nullptr) budget_->on_queue_report(queue_us);
  }
  void clear() {
    if (budget_ == nullptr) return;
    budget_->on_settled((granted_ - received_) * payload_max_bytes_);
    opened_ = granted_ = received_;
    note_expecting();
  }

 private:
  // However many senders there are, each goes on: its arrivals bring the next grant.
  static constexpr uint64_t LEAST_PACKETS = 2;

  uint64_t share_packets() const { return std::max(budget_->share_bytes() / payload_max_bytes_, LEAST_PACKETS); }
  uint64_t extension() const {
    const uint64_t target = std::min(opened_, received_ + share_packets());
    if (target <= granted_) return 0;
    const uint64_t outstanding = granted_ - received_;
    const uint64_t least = outstanding < LEAST_PACKETS ? LEAST_PACKETS - outstanding : 0;
    return std::min(target - granted_, std::max(budget_->grantable_bytes() / payload_max_bytes_, least));
  }
  void note_expecting() {
    if (budget_ == nullptr || (opened_ > received_) == expecting_) return;
    expecting_ = !expecting_;
    budget_->on_expecting(expecting_);
  }

  ReceiveBudget* const budget_;
  const uint32_t payload_max_bytes_;
  uint64_t opened_ = 0, granted_ = 0, received_ = 0;  // bulk packets since the start
  bool expecting_ = false;
};

}  // namespace sennit::flow
