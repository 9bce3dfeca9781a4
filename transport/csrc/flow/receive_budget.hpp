// SPDX-License-Identifier: Apache-2.0
// What all senders to one rank may together have on the way to it: the remedy against incast.
//
// A receive that is posted makes a sender; that alone says nothing about whether its bytes fit the last hop.
// So an advert carries a grant, and each further control extends it as data arrives: never more than the budget
// is granted and not yet received, divided evenly among the flows that expect something (receiver-driven credit
// as in EQDS, Olteanu et al., NSDI 2022, and Homa, Montazeri et al., SIGCOMM 2018). The budget follows the
// bottleneck: it grows while the arrivals are unmarked and the senders see no queue, and shrinks otherwise.
// Shared by the flows of one port; single-threaded, and outlives them.
#pragma once
#include <cstdint>

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

  uint64_t bytes() const { return static_cast<uint64_t>(bytes_); }
  // A flow's part of the budget while it expects data.
  uint64_t share_bytes() const;
  uint32_t expecting_flows() const { return expecting_flows_; }

  // A flow begins or ends to expect data.
  void on_expecting(bool expects) { expects ? ++expecting_flows_ : --expecting_flows_; }
  void on_granted(uint64_t bytes) { granted_bytes_ += bytes; }
  // What was granted is here, or its flow is gone.
  void on_settled(uint64_t bytes) { granted_bytes_ -= bytes; }
  // Granted and not received, over all flows.
  uint64_t granted_bytes() const { return granted_bytes_; }
  uint64_t grantable_bytes() const { return bytes() > granted_bytes_ ? bytes() - granted_bytes_ : 0; }

  void on_arrival(uint32_t bytes, bool ecn_marked);
  // A sender's own measurement of the queueing towards us.
  void on_queue_report(uint64_t queue_us);

 private:
  void end_round();

  const ReceiveBudgetConfig config_;
  double bytes_;
  uint64_t granted_bytes_ = 0;
  uint32_t expecting_flows_ = 0;
  bool is_starting_ = true;
  // A round is one budget's worth of arrivals: about a round trip, without a clock.
  uint64_t round_bytes_ = 0, round_marked_bytes_ = 0;
  uint64_t round_queue_us_ = 0;
  uint32_t good_rounds_ = 0;    // in a row; a round's reports are of the one before
  bool is_reported_ = false;    // some sender said in this round what it sees
  double marked_fraction_ = 0;  // smoothed, RFC 8257
};

}  // namespace sennit::flow
