// SPDX-License-Identifier: Apache-2.0
// A rank of the model: the real mailbox, the real port of shared memory, real lanes over a simulated network, the
// threads of its program, and its memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "messages/mailbox.hpp"
#include "model/exchange/network.hpp"
#include "model/exchange/schedule.hpp"
#include "ports/exposure.hpp"
#include "ports/loan_pool.hpp"
#include "ports/shm/shm_port.hpp"

namespace sennit::model::exchange {

// Where one side has a message, which is its program's own once it is complete.
struct Place {
  std::byte* data = nullptr;  // null: the other side's rank, or a loan
  bool is_posted = false, is_complete = false;
  uint32_t got = NONE;  // by a receive: the message that it took
};

class Rank final : public MailboxClient {
 public:
  Rank(const Schedule& schedule, uint32_t number, Network& network, bool is_verbose);
  ~Rank() override;

  void meet(Rank& peer);
  void set_memory(uint32_t message, bool is_receive, std::byte* data);
  // Once all have met: fills what it sends.
  void begin();

  // One turn of its threads and its port. True when anything moved. Throws Violation.
  bool turn(uint64_t now_us, uint32_t calls);
  // After its end: it still answers what comes over networks.
  void answer(uint64_t now_us);
  void abort();
  void leave();
  // Nobody drives it any more. Its memory stays what it was.
  void freeze() { is_frozen_ = true; }

  bool is_frozen() const { return is_frozen_; }
  bool has_ended() const { return has_ended_; }  // by a failure, an abort or a goodbye
  bool has_failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  bool is_done() const;  // every call is made, and all that was posted is complete
  // A receive from any rank is open: some other rank could still send it.
  bool awaits_any() const;
  bool was_told_of_abort() const { return was_told_of_abort_; }
  // Nothing is still to come on any of its lanes.
  bool is_settled();
  // Its memory is what it was left as, and messages were taken in order.
  void judge() const;
  std::string describe();

  void on_message_sent(uint32_t step) override;
  void on_message_received(uint32_t step, uint32_t peer, const std::byte* data, uint64_t loan) override;

 private:
  struct Held {
    uint32_t message;
    std::byte* data;
    uint64_t loan;
    uint32_t rounds;
  };

  MessageHeader header_of(const Message& message) const;
  bool is_satisfied(const Call& call) const;
  void make(const Call& call);
  void post_send(uint32_t number);
  bool release_loans();
  bool drive_remotes(uint64_t now_us);
  bool is_ending(uint32_t peer);
  void end(const char* last_word);
  void require_message(uint32_t number, const std::byte* data, bool is_result) const;

  const Schedule& schedule_;
  const uint32_t number_;
  const bool is_verbose_;
  ShmPort port_;
  Mailbox mailbox_;
  uint32_t next_key_ = 1;
  KeysOnly exposure_;
  LoanPool loans_;
  std::vector<std::unique_ptr<Remote>> remotes_;  // by rank; null: it is of this host
  std::vector<Place> sends_, receives_;           // by message
  std::vector<std::vector<Call>> threads_;
  std::vector<size_t> at_;  // by thread: the next call
  std::vector<Held> held_;
  bool is_frozen_ = false, has_ended_ = false, was_told_of_abort_ = false;
  std::string failure_;
};

}  // namespace sennit::model::exchange
