// SPDX-License-Identifier: Apache-2.0
// Memory for receives without a destination, shared by all groups of a process, within one bound.
//
// It is allocated on first use, and goes from lane to lane: a process needs as much as is lent at one time, however
// many groups and peers it has. A lane always gets its first few loans. Only what it has beyond them is bounded. So a
// receive that waits for memory waits for its own peer's earlier receives, never for another peer's or another group's,
// and no order of arrivals makes two of them wait for each other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "messages/lane.hpp"
#include "ports/exposure.hpp"
#include "ports/of_process.hpp"

namespace sennit {

// The loan memory of the process (of_process.hpp).
class LoanMemory {
 public:
  // Loans beyond a lane's first few are lent only up to this much in all, and no more than this is kept without need.
  static constexpr size_t EXTRA_BELOW_BYTES = EXTRA_LOANS_BELOW_BYTES;

  LoanMemory() = default;
  ~LoanMemory() {
    for (std::byte* block : free_) delete[] block;
  }
  LoanMemory(const LoanMemory&) = delete;
  LoanMemory& operator=(const LoanMemory&) = delete;

  // Counts one more loan. False: it is an extra loan, and too much is lent.
  bool lend(bool is_extra) {
    const std::lock_guard lock(mutex_);
    if (is_extra && lent_count_ >= MAX_COUNT) return false;
    ++lent_count_;
    return true;
  }
  void end(size_t loan_count) {
    const std::lock_guard lock(mutex_);
    lent_count_ -= loan_count;
  }
  // MAX_LOAN_BYTES, to be given back.
  std::byte* take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) {
      free_.reserve(MAX_COUNT);  // so that give_back cannot fail
      return new std::byte[MAX_LOAN_BYTES];
    }
    std::byte* const block = free_.back();
    free_.pop_back();
    return block;
  }
  void give_back(std::byte* block) noexcept {
    const std::lock_guard lock(mutex_);
    if (free_.size() < MAX_COUNT) {
      free_.push_back(block);
    } else {
      delete[] block;
    }
  }
  size_t lent_bytes() {
    const std::lock_guard lock(mutex_);
    return lent_count_ * MAX_LOAN_BYTES;
  }
  size_t free_bytes() {
    const std::lock_guard lock(mutex_);
    return free_.size() * MAX_LOAN_BYTES;
  }

 private:
  static constexpr size_t MAX_COUNT = EXTRA_BELOW_BYTES / MAX_LOAN_BYTES;

  std::mutex mutex_;
  std::vector<std::byte*> free_;  // the last one used first: it is most likely still in a cache
  size_t lent_count_ = 0;
};

// One port's part of the process's loan memory.
class LoanPool {
 public:
  // `exposure` outlives the pool.
  explicit LoanPool(Exposure& exposure, std::shared_ptr<LoanMemory> memory = of_process<LoanMemory>())
      : exposure_(exposure), memory_(std::move(memory)) {}
  ~LoanPool() {
    for (std::byte* block : taken_) {
      if (is_kept_) {
        delete[] block;  // its devices know it still, so no other port gets it
      } else {
        memory_->give_back(block);
      }
    }
    memory_->end(lent_count_);
  }
  LoanPool(const LoanPool&) = delete;
  LoanPool& operator=(const LoanPool&) = delete;

  // MAX_LOAN_BYTES. Null: this is an extra loan, and too much is lent.
  std::byte* take(bool is_extra) {
    if (!memory_->lend(is_extra)) return nullptr;
    ++lent_count_;
    if (free_.empty()) {
      free_.reserve(taken_.size() + 1);                     // so that give_back cannot fail
      std::unique_ptr<std::byte[]> fresh(memory_->take());  // insert may fail
      taken_.insert(fresh.get());
      std::byte* const block = fresh.release();
      is_kept_ = exposure_.keep(block, MAX_LOAN_BYTES);
      return block;
    }
    std::byte* const block = free_.back();
    free_.pop_back();
    return block;
  }
  void give_back(std::byte* block) {
    if (is_kept_) {
      free_.push_back(block);
    } else {
      taken_.erase(block);
      memory_->give_back(block);
    }
    memory_->end(1);
    --lent_count_;
  }
  // The bytes that this port has now: lent, or kept for its devices.
  size_t taken_bytes() const { return taken_.size() * MAX_LOAN_BYTES; }

 private:
  Exposure& exposure_;
  const std::shared_ptr<LoanMemory> memory_;
  std::unordered_set<std::byte*> taken_;
  // Free memory that devices know. It is kept, because registering it anew would take longer than the message.
  std::vector<std::byte*> free_;
  bool is_kept_ = false;
  size_t lent_count_ = 0;
};

}  // namespace sennit
