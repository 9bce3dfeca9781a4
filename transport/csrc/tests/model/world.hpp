// SPDX-License-Identifier: Apache-2.0
// Runs a schedule to its end and judges the end.
#pragma once
#include <cstdint>
#include <string>

#include "model/direction.hpp"
#include "model/network.hpp"
#include "model/rank.hpp"
#include "model/schedule.hpp"

namespace sennit::model {

// Keeps its memory from one schedule to the next.
class World {
 public:
  struct Tally {
    uint64_t schedules, completed, lost, aborted;  // by what became of the ranks
    uint64_t packets, dropped, duplicated, happenings;
    uint64_t virtual_us;
    Tally& operator+=(const Tally& other);
  };
  static std::string summary(const Tally& tally);
  // Throws Violation.
  void run(uint64_t seed, bool is_verbose, Tally& tally);
  // The schedule that ran last, even if it failed.
  std::string describe() const;

 private:
  void begin(uint64_t seed, bool is_verbose);
  void run_until_rest();
  void apply_faults();
  void happen(const Happening& happening);
  uint64_t frozen_until_us(uint32_t rank) const;
  void judge() const;
  void judge_lost(const Rank& rank, const Rank& peer) const;

  Schedule schedule_{};
  Network network_;
  Rank ranks_[2] = {Rank(0), Rank(1)};
  Direction directions_[2];
  uint32_t faults_applied_ = 0, notices_given_ = 0;  // a bit a fault
  uint64_t happenings_ = 0;
  bool is_late_ = false;  // the deadline has passed
};

}  // namespace sennit::model
