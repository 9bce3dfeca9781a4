// SPDX-License-Identifier: Apache-2.0
// How long a waiting thread spins, yields and then sleeps.
//
// Measured on a 2-core virtual machine: a hand-over costs 0.1 us if the waiter spins, 1.5 us through sched_yield on a
// shared core, and 27 us through futex sleep and wake across cores (the idle core is halted). So a rank with its own
// core spins first. With more ranks than cores, a rank gives the core away at once, which is the fastest.
#pragma once

#include <cstdint>

namespace sennit {

struct BackoffPolicy {
  uint64_t spin_us;
  uint64_t yield_us;

  static constexpr BackoffPolicy choose(uint32_t ranks_here, uint32_t cores) {
    return ranks_here <= cores ? BackoffPolicy{10, 490} : BackoffPolicy{1, 500};
  }
};

class Backoff {
 public:
  enum class Action { spin, yield, sleep };

  explicit Backoff(BackoffPolicy policy) : policy_(policy) {}

  void reset() { idle_since_us_ = 0; }
  Action next(uint64_t now_us) {
    if (idle_since_us_ == 0) idle_since_us_ = now_us;
    const uint64_t idle_us = now_us - idle_since_us_;
    if (idle_us < policy_.spin_us) return Action::spin;
    return idle_us < policy_.spin_us + policy_.yield_us ? Action::yield : Action::sleep;
  }

 private:
  BackoffPolicy policy_;
  uint64_t idle_since_us_ = 0;
};

}  // namespace sennit
