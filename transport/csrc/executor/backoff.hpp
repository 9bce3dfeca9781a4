// SPDX-License-Identifier: Apache-2.0
// How long a waiting thread spins, yields and then sleeps.
//
// Measured on a 2-core virtual machine: a hand-over costs 0.1 us if the waiter spins, 1.5 us through sched_yield on a
// shared core, and 27 us through futex sleep and wake across cores (the idle core is halted). So a rank with its own
// core spins first. With more ranks than cores, a rank gives the core away at once, which is the fastest.
//
// A yield beside a busy process of somebody else costs a time slice (4 ms), because that process keeps the core for so
// long. In Linux 6.18 a thread that yields also moves behind the others by a slice. A thread that sleeps is woken ahead
// of the busy process. So with more ranks than cores, after a yield that took long, all waits sleep at once for a
// while. A rank with its own core does not sleep at once: one disturbance would make large operations several times
// slower for that time.
#pragma once

#include <algorithm>
#include <cstdint>

namespace sennit {

struct BackoffPolicy {
  uint64_t spin_us;
  uint64_t yield_us;
  bool sleeps_after_long_yield;

  static constexpr BackoffPolicy choose(uint32_t ranks_here, uint32_t cores) {
    return ranks_here <= cores ? BackoffPolicy{10, 490, false} : BackoffPolicy{1, 100, true};
  }
};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One object serves one driver after the other.
class Backoff {
 public:
  enum class Action { spin, yield, sleep };
  // Longer than the ranks of this host keep a core between two yields of their own.
  static constexpr uint64_t LONG_YIELD_US = 1'000;
  // A long yield may be chance, and sleeping makes small operations five times slower. Each look whether the core is
  // still shared costs a time slice. So the time without yields is short at first, and doubles each time.
  static constexpr uint64_t CROWDED_MIN_US = 50'000, CROWDED_MAX_US = 1'000'000;

  explicit Backoff(BackoffPolicy policy) : policy_(policy) {}

  // At the start of each round.
  void begin_round(uint64_t now_us) {
    const bool was_long = yielded_us_ != 0 && now_us - yielded_us_ >= LONG_YIELD_US;
    if (was_long && policy_.sleeps_after_long_yield) {
      const bool is_again = now_us < crowded_until_us_ + crowded_us_;
      crowded_us_ = is_again ? std::min(2 * crowded_us_, CROWDED_MAX_US) : CROWDED_MIN_US;
      crowded_until_us_ = now_us + crowded_us_;
    }
    yielded_us_ = 0;
  }
  // Something moved, or a new wait begins.
  void reset() { idle_since_us_ = 0; }
  // Nothing moved.
  Action next(uint64_t now_us) {
    if (idle_since_us_ == 0) idle_since_us_ = now_us;
    const uint64_t idle_us = now_us - idle_since_us_;
    if (idle_us < policy_.spin_us) return Action::spin;
    if (now_us < crowded_until_us_ || idle_us >= policy_.spin_us + policy_.yield_us) return Action::sleep;
    yielded_us_ = now_us;
    return Action::yield;
  }

 private:
  BackoffPolicy policy_;
  uint64_t idle_since_us_ = 0;
  uint64_t yielded_us_ = 0;  // this round ended with a yield; 0: it did not
  uint64_t crowded_us_ = 0, crowded_until_us_ = 0;
};

}  // namespace sennit
