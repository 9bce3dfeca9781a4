// SPDX-License-Identifier: Apache-2.0
#include "executor/team.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#include "executor/lent_time.hpp"
#include "ports/of_process.hpp"

namespace sennit {

TeamUse::TeamUse(uint32_t threads, uint64_t spin_us) : threads_(threads), spin_us_(spin_us) {
  constexpr uint32_t MAX_THREADS = ThreadTeam::MAX_THREADS;
  if (threads < 1 || threads > MAX_THREADS)
    throw std::invalid_argument(std::to_string(threads) + " threads; allowed: 1.." + std::to_string(MAX_THREADS));
  if (threads == 1) return;
  team_ = of_process<ThreadTeam>();
  team_->grow(threads);
}

void ThreadTeam::grow(uint32_t threads) {
  const std::lock_guard lock(mutex_);
  try {
    while (workers_.size() + 1 < threads) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(), "cannot start " + std::to_string(threads - 1) + " threads beside the first");
  }
}

size_t ThreadTeam::worker_count() {
  const std::lock_guard lock(mutex_);
  return workers_.size();
}

ThreadTeam::~ThreadTeam() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_.store(true);
  }
  has_work_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadTeam::run(const Job& job, uint64_t spin_us) {
  job_ = job;
  spin_us_.store(spin_us, std::memory_order_relaxed);
  done_count_.store(0, std::memory_order_relaxed);
  const uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 2 * PART_BITS) + 1;
  // Before the look at the sleepers, in one order with theirs: either they see the job, or this thread sees them.
  ticket_.store(number << 2 * PART_BITS | uint64_t{job.part_count} << PART_BITS, std::memory_order_seq_cst);
  if (sleeper_count_.load(std::memory_order_seq_cst) != 0) {
    const std::lock_guard lock(mutex_);
    has_work_.notify_all();
  }
  while (run_part()) {
  }
  // What others have begun takes them no longer than a part takes this thread, once they have a core.
  while (done_count_.load(std::memory_order_acquire) != job.part_count) sched_yield();
}

bool ThreadTeam::has_part() const {
  const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
  return (ticket & PART_MASK) < (ticket >> PART_BITS & PART_MASK);
}

// Takes the next part. The job stays as it is until all its parts are done, so it may be read once a part is taken.
bool ThreadTeam::run_part() {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  do {
    if ((ticket & PART_MASK) >= (ticket >> PART_BITS & PART_MASK)) return false;
  } while (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire));
  const auto part = static_cast<uint32_t>(ticket & PART_MASK);
  const uint64_t steps = (job_.count + job_.step - 1) / job_.step;
  const auto border = [&](uint64_t at) { return std::min(job_.count, steps * at / job_.part_count * job_.step); };
  job_.call(job_.context, part, border(part), border(part + 1));
  done_count_.fetch_add(1, std::memory_order_acq_rel);
  return true;
}

void ThreadTeam::work() {
  begin_own_thread("sennit-team");
  using Clock = std::chrono::steady_clock;
  while (!is_stopping_.load(std::memory_order_relaxed)) {
    const auto until = Clock::now() + std::chrono::microseconds(spin_us_.load(std::memory_order_relaxed));
    bool found = run_part();
    while (!found && Clock::now() < until) found = run_part();
    if (found) continue;
    std::unique_lock lock(mutex_);
    sleeper_count_.fetch_add(1, std::memory_order_seq_cst);
    has_work_.wait(lock, [this] { return is_stopping_.load(std::memory_order_relaxed) || has_part(); });
    sleeper_count_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace sennit
