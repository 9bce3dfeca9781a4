// SPDX-License-Identifier: Apache-2.0
// The threads that share the local work of large steps with the driver: folds and copies (SENNIT_THREADS).
//
// The driver cuts the work into parts and takes parts until none is left, and so does every worker that runs in time.
// The driver then waits for parts that workers have begun, and for nothing else: a worker that gets no core costs
// nothing. Who computes a part decides no bit, because parts have no element in common.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace sennit {

class ThreadTeam {
 public:
  static constexpr uint32_t MAX_THREADS = 64;

  // `threads`: the driver and threads - 1 workers, which are started here: all or none. A worker that finds nothing
  // looks again for `spin_us`, then sleeps. Throws std::invalid_argument, or std::system_error if there is no thread.
  ThreadTeam(uint32_t threads, uint64_t spin_us);
  ~ThreadTeam() { stop(); }
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  uint32_t threads() const { return static_cast<uint32_t>(workers_.size()) + 1; }
  // Calls work(part, begin, end) for parts of 0..count that begin at multiples of `step`. There are at most as many as
  // threads, of at least `part_min`, or one. One thread at a time may call it. `work` does not throw.
  template <class Work>
  void share(uint64_t count, uint64_t part_min, uint64_t step, const Work& work) {
    const uint64_t part_count = std::min<uint64_t>(threads(), count / std::max<uint64_t>(part_min, 1));
    if (part_count < 2) return work(0, 0, count);
    run({[](const void* context, uint32_t part, uint64_t begin, uint64_t end) noexcept {
           (*static_cast<const Work*>(context))(part, begin, end);
         },
         &work, count, static_cast<uint32_t>(part_count), step});
  }

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

  void run(const Job& job);
  bool has_part() const;
  bool run_part();
  void work(uint64_t spin_us);
  void stop() noexcept;

  Job job_{};
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_count_{0};
  std::atomic<uint32_t> sleeper_count_{0};
  std::atomic<bool> is_stopping_{false};
  std::mutex mutex_;
  std::condition_variable has_work_;
  std::vector<std::thread> workers_;
};

}  // namespace sennit
