// SPDX-License-Identifier: Apache-2.0
// Memory for receives without a destination, shared by the lanes of a port.
//
// It is allocated on first use, and goes from lane to lane: a port needs as much as is lent at one time, however many
// peers it has. A lane always gets its first few loans. So a receive that waits for memory waits only for its own
// peer's earlier receives, never for another peer's, and no order of arrivals makes two of them wait for each other.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "messages/lane.hpp"
#include "ports/exposure.hpp"

namespace sennit {

class LoanPool {
 public:
  // Loans beyond a lane's first few are lent only up to this much in all.
  static constexpr size_t EXTRA_BELOW_BYTES = 33'554'432;

  // `exposure` outlives the pool.
  explicit LoanPool(Exposure& exposure) : exposure_(exposure) {}

  // MAX_LOAN_BYTES. Null: this is an extra loan, and too much is lent.
  std::byte* take(bool is_extra) {
    if (is_extra && lent_count_ * MAX_LOAN_BYTES >= EXTRA_BELOW_BYTES) return nullptr;
    if (free_.empty()) {
      all_.push_back(std::make_unique_for_overwrite<std::byte[]>(MAX_LOAN_BYTES));
      exposure_.keep(all_.back().get(), MAX_LOAN_BYTES);
      free_.reserve(all_.size());  // so that give_back cannot fail
      free_.push_back(all_.back().get());
    }
    std::byte* const memory = free_.back();
    free_.pop_back();
    ++lent_count_;
    return memory;
  }
  void give_back(std::byte* memory) {
    free_.push_back(memory);
    --lent_count_;
  }
  size_t allocated_bytes() const { return all_.size() * MAX_LOAN_BYTES; }

 private:
  Exposure& exposure_;
  std::vector<std::unique_ptr<std::byte[]>> all_;
  std::vector<std::byte*> free_;  // the last one used first: it is most likely still in a cache
  size_t lent_count_ = 0;
};

}  // namespace sennit
