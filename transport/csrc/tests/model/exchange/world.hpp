// SPDX-License-Identifier: Apache-2.0
// Several ranks of one process exchange messages, over shared memory where they are of one host and else over a network
// that loses some packets, with budgets of a few messages (small/messages/budgets.hpp). One of them may pause, freeze,
// abort or leave. The mailbox, the lanes, the flows and the port of shared memory are those of the product. Turns are
// drawn at random, and time is virtual. The rules:
//
//   - Whatever has its send and its receive posted becomes complete, as long as no rank ends.
//   - Then every lane is settled: no record, block, reference, loan or credit is left over.
//   - Bytes are right, and so are the results of round trips. Memory is the program's own again once it is told so.
//   - Messages of one sender and tag are taken in order.
//   - Once a rank has ended or frozen, every other one is done or fails: none waits for ever.
//   - Nothing is sent, with success, to a rank that is known to have ended.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory/shared_heap.hpp"
#include "model/exchange/rank.hpp"
#include "model/exchange/schedule.hpp"
#include "sim.hpp"

namespace sennit::model::exchange {

class World {
 public:
  struct Tally {
    uint64_t schedules, done, failed, told,
        messages;  // ranks that were done, failed, heard of an abort; messages drawn
    Tally& operator+=(const Tally& other);
  };
  static std::string summary(const Tally& tally);

  World();
  ~World();
  World(const World&) = delete;

  // Throws Violation.
  void run(uint64_t seed, bool is_verbose, Tally& tally);
  std::string describe() const;

 private:
  void give_memory();
  void run_until_rest(SimRandom& random);
  void apply_fault(uint32_t turn);
  bool may_run(uint32_t rank, uint32_t turn) const;
  bool are_all_at_rest() const;
  bool end_at_deadline();
  void judge(Tally& tally);

  Schedule schedule_;
  Network network_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::byte* const heap_;
  std::vector<std::byte> plain_;
  bool has_fault_ = false;  // the fault has happened
};

}  // namespace sennit::model::exchange
