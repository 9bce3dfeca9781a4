// SPDX-License-Identifier: Apache-2.0
#include "batch_queue.hpp"

#include <algorithm>
#include <utility>

#include "sennit/own_thread.hpp"
#include "store_error.hpp"

namespace sennit::memory {

BatchQueue::BatchQueue(RowCache& cache, std::uint64_t row_count)
    : cache_(cache), row_count_(row_count), thread_([this] { run(); }) {}

BatchQueue::~BatchQueue() {
  {
    const std::lock_guard guard(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void BatchQueue::run() {
  begin_thread("sennit-rows");
  std::unique_lock guard(mutex_);
  for (;;) {
    changed_.wait(guard, [this] { return is_ending_ || !commands_.empty(); });
    if (is_ending_) return;
    const std::function<void()> command = std::move(commands_.front());
    commands_.pop_front();
    if (!failure_) {
      guard.unlock();
      std::exception_ptr failure;
      try {
        command();
      } catch (...) {
        failure = std::current_exception();
      }
      guard.lock();
      failure_ = failure;
      counters_ = cache_.counters();
    }
    changed_.notify_all();
  }
}

void BatchQueue::check() {
  if (failure_) std::rethrow_exception(failure_);
}

void BatchQueue::check_unused(const char* why) const {
  if (in_use_ != 0)
    throw StoreError(Fault::ARGUMENT, std::to_string(in_use_) + " batches were waited for and are not released: " +
                                          why + " rows that are half way through an update");
}

void BatchQueue::put(std::function<void()> command) {
  commands_.push_back(std::move(command));
  changed_.notify_all();
}

std::shared_ptr<BatchQueue::Batch> BatchQueue::fetch(std::vector<std::int64_t> rows, std::vector<std::int64_t> begins) {
  // Checked before the cache is touched: a wrong row is the caller's mistake, and the cache stays usable.
  RowCache::check_rows(rows, row_count_);
  auto batch = std::make_shared<Batch>();
  batch->rows = std::move(rows);
  std::ranges::sort(begins);
  batch->begins = std::move(begins);
  batch->lines.resize(batch->rows.size());
  const std::lock_guard guard(mutex_);
  check();
  put([this, batch] {
    std::exception_ptr refusal;
    try {
      batch->pins = cache_.fetch(batch->rows, batch->lines.data(), batch->begins);
    } catch (const StoreError& error) {
      if (error.fault != Fault::NO_ROOM) throw;
      refusal = std::current_exception();
    }
    const std::lock_guard inner(mutex_);
    batch->refusal = refusal;
    batch->is_done = true;
  });
  return batch;
}

bool BatchQueue::wait(const std::shared_ptr<Batch>& batch, std::chrono::steady_clock::time_point deadline) {
  std::unique_lock guard(mutex_);
  if (batch->is_released) throw StoreError(Fault::ARGUMENT, "the batch was released");
  changed_.wait_until(guard, deadline, [&] { return batch->is_done || failure_; });
  if (!batch->is_done) {
    check();
    return false;
  }
  if (batch->refusal) std::rethrow_exception(batch->refusal);
  if (!batch->is_in_use) in_use_++;
  batch->is_in_use = true;
  return true;
}

void BatchQueue::release(const std::shared_ptr<Batch>& batch, bool is_dirty) {
  const std::lock_guard guard(mutex_);
  if (batch->is_released) throw StoreError(Fault::ARGUMENT, "the batch was released");
  if (is_dirty && !batch->is_in_use)
    throw StoreError(Fault::ARGUMENT, "rows of a batch that nobody waited for cannot have changed");
  check();
  batch->is_released = true;
  if (batch->is_in_use) in_use_--;
  put([this, batch, is_dirty] { cache_.release(batch->pins, is_dirty); });
}

std::optional<std::uint64_t> BatchQueue::flush(std::uint64_t tag, std::chrono::steady_clock::time_point deadline) {
  std::unique_lock guard(mutex_);
  check();
  check_unused("a generation would hold");
  // The thread may still write this after the caller has given up.
  const auto generation = std::make_shared<std::optional<std::uint64_t>>();
  put([this, generation, tag] {
    const std::uint64_t made = cache_.flush(tag);
    const std::lock_guard inner(mutex_);
    *generation = made;
  });
  changed_.wait_until(guard, deadline, [&] { return generation->has_value() || failure_; });
  if (!generation->has_value()) check();
  return *generation;
}

std::shared_ptr<const BatchQueue::Parts> BatchQueue::read(std::vector<std::int64_t> rows,
                                                          const std::vector<std::size_t>& row_bytes, bool is_between,
                                                          std::chrono::steady_clock::time_point deadline) {
  RowCache::check_rows(rows, row_count_);
  // The thread may still use this after the caller has given up.
  struct Reading {
    std::vector<std::int64_t> rows;
    Parts parts;
    bool is_done = false;
  };
  const auto reading = std::make_shared<Reading>();
  for (const std::size_t size : row_bytes) reading->parts.emplace_back(rows.size() * size);
  reading->rows = std::move(rows);
  std::unique_lock guard(mutex_);
  check();
  if (!is_between) check_unused("they may have");
  put([this, reading, row_bytes] {
    Lines out;
    for (std::size_t n = 0; n < row_bytes.size(); n++) out.parts.push_back({reading->parts[n].data(), row_bytes[n]});
    cache_.read(reading->rows, out);
    const std::lock_guard inner(mutex_);
    reading->is_done = true;
  });
  changed_.wait_until(guard, deadline, [&] { return reading->is_done || failure_; });
  if (!reading->is_done) {
    check();
    return nullptr;
  }
  return {reading, &reading->parts};
}

RowCache::Counters BatchQueue::counters() {
  const std::lock_guard guard(mutex_);
  return counters_;
}

}  // namespace sennit::memory
