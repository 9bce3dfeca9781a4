// SPDX-License-Identifier: Apache-2.0
// The threads that share the local work of large steps with a driver: folds and copies (SENNIT_THREADS). They belong to
// all groups of the process.
//
// The driver cuts the work into parts and takes parts until none is left, and so does every worker that runs in time.
// The driver then waits for parts that workers have begun, and for nothing else: a worker that gets no core costs
// nothing. A driver that finds the team at another group's work does its own alone. Who computes a part decides no bit,
// because parts have no element in common.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sennit {

class ThreadTeam {
 public:
  static constexpr uint32_t MAX_THREADS = 64;

  ThreadTeam() = default;
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // Starts workers until there are `threads` - 1. Throws std::system_error if a thread cannot be started. Workers that
  // were started stay.
  void grow(uint32_t threads);
  size_t worker_count();

  // The team, for one driver. False: another one has it.
  class Turn;

 private:
  struct Job {
    void (*call)(const void* context, uint32_t part, uint64_t begin, uint64_t end) noexcept;
    const void* context;
    uint64_t count;
    uint32_t part_count;
    uint64_t step;
  };
  // The job's number, how many parts it has, and the next of them: one word, so that nobody takes a part of a job that
  // is over.
  static constexpr uint32_t PART_BITS = 16;
  static constexpr uint64_t PART_MASK = (uint64_t{1} << PART_BITS) - 1;

  void run(const Job& job, uint64_t spin_us);
  bool has_part() const;
  bool run_part();
  void work();

  std::mutex turn_mutex_;  // held by the driver whose job it is
  Job job_{};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_count_{0};
  std::atomic<uint64_t> spin_us_{0};
  std::atomic<uint32_t> sleeper_count_{0};
  std::atomic<bool> is_stopping_{false};
  std::mutex mutex_;
  std::condition_variable has_work_;
  std::vector<std::thread> workers_;
};

class ThreadTeam::Turn {
 public:
  // `threads`: how many may share the work. Below 2 nothing is taken. Workers that find nothing more look again for
  // `spin_us`, then sleep.
  Turn(ThreadTeam* team, uint32_t threads, uint64_t spin_us) : team_(team), spin_us_(spin_us) {
    if (team == nullptr || threads < 2) return;
    lock_ = std::unique_lock(team->turn_mutex_, std::try_to_lock);
    if (lock_) threads_ = threads;
  }

  // The number of threads that share the work, the driver included. 1: the driver works alone.
  uint32_t threads() const { return threads_; }
  // Calls work(part, begin, end) for parts of 0..count that begin at multiples of `step`, one for each thread. `work`
  // does not throw.
  template <class Work>
  void share(uint64_t count, uint64_t step, const Work& work) {
    if (threads_ < 2) return work(0, 0, count);
    team_->run({[](const void* context, uint32_t part, uint64_t begin, uint64_t end) noexcept {
                  (*static_cast<const Work*>(context))(part, begin, end);
                },
                &work, count, threads_, step},
               spin_us_);
  }

 private:
  ThreadTeam* const team_;
  const uint64_t spin_us_;
  std::unique_lock<std::mutex> lock_;
  uint32_t threads_ = 1;
};

// What one group uses of the process's team.
class TeamUse {
 public:
  // `threads`: 1..MAX_THREADS, the driver included. `spin_us`: see Turn. Throws std::invalid_argument, or
  // std::system_error if there is no thread.
  TeamUse(uint32_t threads, uint64_t spin_us);

  uint32_t threads() const { return threads_; }
  // The team for one piece of work, of which a part of `part_min` is worth a thread's while.
  ThreadTeam::Turn take(uint64_t count, uint64_t part_min) const {
    const uint64_t parts = std::min<uint64_t>(threads_, count / std::max<uint64_t>(part_min, 1));
    return {team_.get(), static_cast<uint32_t>(parts), spin_us_};
  }

 private:
  const uint32_t threads_;
  const uint64_t spin_us_;
  std::shared_ptr<ThreadTeam> team_;  // null where the driver is the only one
};

}  // namespace sennit
