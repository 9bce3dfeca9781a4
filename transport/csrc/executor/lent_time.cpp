// SPDX-License-Identifier: Apache-2.0
#include "executor/lent_time.hpp"

#include <time.h>

#include <atomic>

#include "sennit/own_thread.hpp"

namespace sennit {
namespace {

constexpr uint64_t NOT_COUNTED = UINT64_MAX;

std::atomic<uint32_t> askers{0};
std::atomic<uint64_t> lent_ns{0};
// In an outer LentTime, or a thread of the transport.
thread_local bool is_inside = false;

uint64_t thread_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

LentTime::LentTime() noexcept : began_ns_(NOT_COUNTED) {
  if (askers.load(std::memory_order_relaxed) == 0 || is_inside) return;
  is_inside = true;
  began_ns_ = thread_ns();
}

LentTime::~LentTime() {
  if (began_ns_ == NOT_COUNTED) return;
  lent_ns.fetch_add(thread_ns() - began_ns_, std::memory_order_relaxed);
  is_inside = false;
}

void LentTime::count(bool is_on) noexcept {
  if (is_on) {
    askers.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  uint32_t now = askers.load(std::memory_order_relaxed);
  while (now != 0 && !askers.compare_exchange_weak(now, now - 1, std::memory_order_relaxed)) {
  }
}

uint64_t LentTime::total_ns() noexcept { return lent_ns.load(std::memory_order_relaxed); }

void begin_own_thread(const char* name) noexcept {
  begin_thread(name);
  is_inside = true;
}

}  // namespace sennit
