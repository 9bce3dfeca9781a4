// SPDX-License-Identifier: Apache-2.0
#include "stand_in.hpp"

#include <sched.h>

#include <atomic>
#include <utility>

namespace sennit::runtime::stand_in {
namespace {

thread_local bool active_here = false;
std::atomic<uint64_t> random_state{0};
std::atomic<uint32_t> yields_max{0};

// SplitMix64 (Steele, Lea and Flood, 2014).
uint64_t draw() {
  uint64_t value = random_state.fetch_add(0x9E3779B97F4A7C15ULL, std::memory_order_relaxed) + 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

}  // namespace

bool set_active(bool active) { return std::exchange(active_here, active); }

bool is_active() { return active_here; }

void delay_copies(uint64_t seed, uint32_t max_yields) {
  random_state.store(seed, std::memory_order_relaxed);
  yields_max.store(max_yields, std::memory_order_relaxed);
}

void delay() {
  const uint32_t limit = yields_max.load(std::memory_order_relaxed);
  if (limit == 0) return;
  for (uint64_t left = draw() % (uint64_t{limit} + 1); left != 0; --left) sched_yield();
}

}  // namespace sennit::runtime::stand_in
