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

}  // namespace sennit::flow
