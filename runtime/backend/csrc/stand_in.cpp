// SPDX-License-Identifier: Apache-2.0
#include "stand_in.hpp"

#include <time.h>

#include <atomic>
#include <utility>

namespace sennit::runtime::stand_in {
namespace {

thread_local bool active_here = false;
std::atomic<uint64_t> random_state{0};
std::atomic<uint32_t> pause_max_us{0};

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

void delay_copies(uint64_t seed, uint32_t max_us) {
  random_state.store(seed, std::memory_order_relaxed);
  pause_max_us.store(max_us, std::memory_order_relaxed);
}

void delay() {
  const uint64_t limit_us = pause_max_us.load(std::memory_order_relaxed);
  if (limit_us == 0) return;
  const uint64_t drawn = draw() % (2 * limit_us);
  if (drawn < limit_us) return;
  // Not sched_yield: beside a busy process each yield costs a time slice.
  const timespec pause{0, static_cast<long>((drawn - limit_us) * 1'000)};
  nanosleep(&pause, nullptr);
}

}  // namespace sennit::runtime::stand_in
