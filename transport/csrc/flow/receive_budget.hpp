// SPDX-License-Identifier: Apache-2.0
// What all senders to one rank may together have on the way to it: the remedy against incast.
//
// A receive that is posted makes a sender; that alone says nothing about whether its bytes fit the last hop.
// So an advert carries a grant, and each further control extends it as data arrives: never more than the budget
// is granted and not yet received, divided evenly among the flows that expect something (receiver-driven credit
// as in EQDS, Olteanu et al., NSDI 2022, and Homa, Montazeri et al., SIGCOMM 2018). The budget follows the
// bottleneck: it grows while the arrivals are unmarked and the senders see no queue, and shrinks otherwise.
//
// A grant cannot be taken back, and its sender may compute or be stopped. What nothing was taken of for a while is
// parked: it leaves the budget to the others, and counts again from the flow's next arrival on. There is no timer:
// the flows that do receive look for those that do not.
// Shared by the flows of one port; single-threaded, and outlives them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sennit::flow {

struct ReceiveBudgetConfig {
  uint64_t max_bytes = 2'097'152;  // with one sender as good as no limit
  uint64_t start_bytes = 262'144;  // a quarter more by each two rounds of good news, until the first bad
  uint64_t min_bytes = 32'768;     // however long the queue is
  uint64_t target_queue_us = 100;  // queueing that the senders may see
};

class ReceiveBudget {
 public:
  // Throws std::invalid_argument unless 0 < min_bytes <= start_bytes <= max_bytes.
  explicit ReceiveBudget(const ReceiveBudgetConfig& config = {});

  // A flow's part; known to the budget while the flow expects data.
  struct Account {
    uint64_t idle_us = 0;        // parked after so long without an arrival or a new grant; the flow's to set
    uint64_t granted_bytes = 0;  // and not received
    uint64_t parked_bytes = 0;   // of these
    uint64_t touched_us = 0, touched_look = 0;
    // What was granted to others before is here when so much has arrived: behind them in a queue it is not late.
    uint64_t behind_bytes = 0;
    size_t index = 0;
    bool is_parked = false;
  };

  uint64_t bytes() const { return static_cast<uint64_t>(bytes_); }
  // A flow's part of the budget while it expects data.
  uint64_t share_bytes() const;
  // Another number whenever the share is another one.
  uint64_t share_version() const { return share_version_; }
  uint32_t expecting_flows() const { return static_cast<uint32_t>(accounts_.size()); }

  // A flow begins or ends to expect data; at the end nothing is granted to it.
  void on_expecting(Account& account, bool expects);
  // `wanted_bytes`: what its share had room for, if its data arrives.
  void on_granted(Account& account, uint64_t now_us, uint64_t bytes, uint64_t wanted_bytes);
  void on_arrival(Account& account, uint64_t now_us, uint32_t bytes, bool ecn_marked);
  // What was granted is here, or its flow is gone.
  void on_settled(Account& account, uint64_t bytes);
  // Parks what is idle. Often called and seldom busy.
  void look(uint64_t now_us);

  // Granted, not received and not parked, over all flows.
  uint64_t granted_bytes() const { return granted_bytes_; }
  uint64_t parked_bytes() const { return parked_bytes_; }
  // For a flow whose data arrives.
  uint64_t grantable_bytes() const { return bytes() > granted_bytes_ ? bytes() - granted_bytes_ : 0; }
  // For one of which nothing is known: all that may begin at any moment is at most one budget.
  uint64_t grantable_unseen_bytes() const {
    return grantable_bytes() > parked_bytes_ ? grantable_bytes() - parked_bytes_ : 0;
  }

  // A sender's own measurement of the queueing towards us.
  void on_queue_report(uint64_t queue_us);

 private:
  void touch(Account& account, uint64_t now_us) const;
  void park(Account& account);
  void readmit(Account& account);
  void end_round(bool is_full);

  const ReceiveBudgetConfig config_;
  double bytes_;
  uint64_t granted_bytes_ = 0, parked_bytes_ = 0;
  std::vector<Account*> accounts_;  // of the flows that expect data
  uint32_t parked_flows_ = 0;
  uint64_t share_version_ = 0;
  uint64_t looks_ = 0, look_at_us_ = 0;
  uint64_t arrived_bytes_ = 0;  // since the start
  bool is_starting_ = true;
  // A round is one budget's worth of arrivals: about a round trip. By the clock only when they are few.
  uint64_t round_bytes_ = 0, round_marked_bytes_ = 0, round_began_us_ = 0;
  bool is_short_ = false;  // some flow got less in this round than it wanted
  uint64_t round_queue_us_ = 0;
  uint32_t good_rounds_ = 0;    // in a row; a round's reports are of the one before
  bool is_reported_ = false;    // some sender said in this round what it sees
  double marked_fraction_ = 0;  // smoothed, RFC 8257
};

// Without a budget: ahead of what was received by more than any window.
inline constexpr uint64_t GRANT_UNLIMITED_PACKETS = uint64_t{1} << 30;

// The receiving side of a flow's credit: how many bulk packets its sender may have sent, counted from the start.
//
// The count is cumulative and travels in every control, so that a control may be lost, doubled or overtaken.
// Retransmissions take no grant: what was lost is still granted and not received, so in flight is never more.
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
