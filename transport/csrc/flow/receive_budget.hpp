// SPDX-License-Identifier: Apache-2.0
// How many bytes all senders to one rank may have in flight to it: the limit on incast.
//
// Every posted receive has a sender, whether or not the last hop can carry the bytes of all of them. So an advert
// carries a grant, and each later control extends the grant as data arrives. The bytes that are granted and not yet
// received never exceed the budget. The budget is divided evenly among the flows that expect data (receiver-driven
// credit as in EQDS, Olteanu et al., NSDI 2022, and Homa, Montazeri et al., SIGCOMM 2018). The budget follows the
// bottleneck: it grows while arrivals are unmarked and senders see no queue, and shrinks otherwise.
//
// A grant cannot be taken back, and its sender may compute or be stopped. So a grant that has not been used for a while
// is parked: it does not count against the budget until the flow's next arrival. There is no timer: the flows that
// receive data check for idle flows.
//
// All flows of a port share one budget, which outlives them. Single-threaded.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sennit::flow {

struct ReceiveBudgetConfig {
  uint64_t max_bytes = 2'097'152;  // large enough not to limit a single sender
  uint64_t start_bytes = 262'144;  // grows by a quarter every two good rounds, until the first bad one
  uint64_t min_bytes = 32'768;     // the minimum, however long the queue is
  uint64_t target_queue_us = 100;  // queueing delay that is acceptable to senders
};

class ReceiveBudget {
 public:
  // Throws std::invalid_argument unless 0 < min_bytes <= start_bytes <= max_bytes.
  explicit ReceiveBudget(const ReceiveBudgetConfig& config = {});

  // One flow's account with the budget while the flow expects data.
  struct Account {
    uint64_t idle_us = 0;        // parked after this time without an arrival or a new grant; set by the flow
    uint64_t granted_bytes = 0;  // granted and not received
    uint64_t parked_bytes = 0;   // part of granted_bytes
    uint64_t touched_us = 0, touched_look = 0;
    // Until the budget has seen this many arrivals, the flow's data may wait in a queue behind data that was granted to
    // others earlier. So the flow does not count as idle.
    uint64_t behind_bytes = 0;
    size_t index = 0;
    bool is_parked = false;
  };

  uint64_t bytes() const { return static_cast<uint64_t>(bytes_); }
  // One flow's share of the budget while it expects data.
  uint64_t share_bytes() const;
  // Changes whenever the share changes.
  uint64_t share_version() const { return share_version_; }
  uint32_t expecting_flows() const { return static_cast<uint32_t>(accounts_.size()); }

  // A flow begins or stops to expect data. After it stops, it gets no grants.
  void on_expecting(Account& account, bool expects);
  // `wanted_bytes`: what the flow's share had room for, if its data arrives.
  void on_granted(Account& account, uint64_t now_us, uint64_t bytes, uint64_t wanted_bytes);
  void on_arrival(Account& account, uint64_t now_us, uint32_t bytes, bool ecn_marked);
  // Granted bytes arrived, or their flow is gone.
  void on_settled(Account& account, uint64_t bytes);
  // Parks the grants of idle flows. Called often, but rarely does work.
  void look(uint64_t now_us);

  // Granted, not received and not parked: the sum over all flows.
  uint64_t granted_bytes() const { return granted_bytes_; }
  uint64_t parked_bytes() const { return parked_bytes_; }
  // The largest grant to a flow whose data arrives.
  uint64_t grantable_bytes() const { return bytes() > granted_bytes_ ? bytes() - granted_bytes_ : 0; }
  // The largest grant to a flow that has sent nothing yet. All senders that may begin at any moment get at most one
  // budget together.
  uint64_t grantable_unseen_bytes() const {
    return grantable_bytes() > parked_bytes_ ? grantable_bytes() - parked_bytes_ : 0;
  }

  // The queueing delay towards this rank, as a sender measured it.
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
  // A round is one budget of arrivals, about one round-trip time. The clock ends it only if arrivals are few.
  uint64_t round_bytes_ = 0, round_marked_bytes_ = 0, round_began_us_ = 0;
  bool is_short_ = false;  // a flow got less in this round than it wanted
  uint64_t round_queue_us_ = 0;
  uint32_t good_rounds_ = 0;    // good rounds in a row; the reports of a round are about the one before
  bool is_reported_ = false;    // a sender reported its queueing delay in this round
  double marked_fraction_ = 0;  // smoothed, RFC 8257
};

// The grant beyond what was received, if there is no budget: more than any window.
inline constexpr uint64_t GRANT_UNLIMITED_PACKETS = uint64_t{1} << 30;

// The receiving side of a flow's grant: how many bulk packets its sender may have sent, counted from the start.
//
// The count is cumulative and travels in every control, so that a control may be lost, doubled or overtaken.
// Retransmissions take no grant: a lost packet still counts as granted and not received, so the limit on bytes in
// flight holds.
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
    // A sender that exceeds its grant must gain nothing by it.
    if (++received_ <= granted_)
      budget_->on_settled(account_, payload_max_bytes_);
    else
      granted_ = received_;
    note_expecting();
  }
  // Asked after an arrival: whether a control should announce a larger grant now. It should if the sender has used half
  // of its grant, or all of it.
  bool is_due() {
    if (budget_ == nullptr || granted_ == opened_) return false;
    const uint64_t share = share_packets();
    const uint64_t outstanding = granted_ - received_;
    if (outstanding > share / 2) return false;
    return extension(true) >= (outstanding == 0 ? 1 : std::max<uint64_t>(share / 4, 1));
  }
  // The count for the next control, extended as far as the budget allows.
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
  // However many senders there are, each makes progress: its arrivals bring the next grant.
  static constexpr uint64_t LEAST_PACKETS = 2;

  // A few round-trip times of a data centre, so that a flow that is only late does not count as idle.
  static constexpr uint64_t IDLE_MIN_US = 1'000;

  // Cached, because it is needed at each arrival and changes once a round.
  uint64_t share_packets() {
    if (share_version_ != budget_->share_version()) {
      share_version_ = budget_->share_version();
      share_packets_ = std::max(budget_->share_bytes() / payload_max_bytes_, LEAST_PACKETS);
    }
    return share_packets_;
  }
  // What remains of the share. Nothing for a sender that does not use its grant.
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
    budget_->on_expecting(account_, !expecting_);
    expecting_ = !expecting_;
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
