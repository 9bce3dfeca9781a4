// SPDX-License-Identifier: Apache-2.0
// A cache driven by its own thread, which fetches the next batch's rows while the current one is computed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "row_cache.hpp"

namespace sennit::memory {

// Runs fetches, releases and flushes in the order of the calls, so the place of a row does not depend on how long
// anything takes. After an error each later call raises it again, but for a batch that does not fit: only `wait` for it
// does.
class BatchQueue {
 public:
  struct Batch {
    std::vector<std::int64_t> rows, begins, lines;
    RowCache::Pins pins;
    std::exception_ptr refusal;  // it does not fit: nothing is pinned
    bool is_done = false, is_in_use = false, is_released = false;
  };

  BatchQueue(RowCache& cache, std::uint64_t row_count);
  // Finishes the current operation and drops the others.
  ~BatchQueue();
  BatchQueue(const BatchQueue&) = delete;

  // `begins`: of `RowCache::fetch`, in any order.
  std::shared_ptr<Batch> fetch(std::vector<std::int64_t> rows, std::vector<std::int64_t> begins = {});
  // False if the deadline passes first. Raises StoreError if the fetch failed.
  bool wait(const std::shared_ptr<Batch>& batch, std::chrono::steady_clock::time_point deadline);
  void release(const std::shared_ptr<Batch>& batch, bool is_dirty);
  // Returns the number of the generation once it is durable. Empty if the deadline passes first; it may still become
  // durable.
  std::optional<std::uint64_t> flush(std::uint64_t tag, std::chrono::steady_clock::time_point deadline);
  // Returns the current parts of `rows`, each row once; null if the deadline passes first. `row_bytes`: for each part.
  // `is_between`: no update is under way, so rows may be read though batches use them.
  using Parts = std::vector<std::vector<std::byte>>;
  std::shared_ptr<const Parts> read(std::vector<std::int64_t> rows, const std::vector<std::size_t>& row_bytes,
                                    bool is_between, std::chrono::steady_clock::time_point deadline);
  RowCache::Counters counters();

 private:
  void run();
  void put(std::function<void()> command);
  void check();
  void check_unused(const char* why) const;

  RowCache& cache_;
  std::uint64_t row_count_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> commands_;
  RowCache::Counters counters_;
  std::exception_ptr failure_;
  std::uint64_t in_use_ = 0;  // batches that were waited for and not released
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace sennit::memory
