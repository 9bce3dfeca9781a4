// SPDX-License-Identifier: Apache-2.0
// Posts one operation with a plan of this shape on the group's communicator. Handles cache, deadline and error text.
#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>

#include "plan_cache.hpp"
#include "work.hpp"

namespace sennit::runtime {

struct PostOptions {
  uint64_t timeout_us = 0;  // 0: the group's default
  bool async = true;        // nobody waits soon: the core's thread must drive it
  uint32_t tag = 0;         // P2P only
};

// A deadline of torch. What is longer than a century is a century: sums of times do not overflow then.
inline uint64_t to_us(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds LONGEST = std::chrono::hours(24 * 36'500);
  return static_cast<uint64_t>(std::clamp(timeout, std::chrono::milliseconds(1), LONGEST).count()) * 1000;
}

using Buffers = c10::SmallVector<sennit_buffer, 4>;

class Poster {
 public:
  Poster(std::shared_ptr<GroupState> group, CompilePlan compile, size_t plan_cache_bytes, uint64_t timeout_us);

  // Returns a new operation (the caller owns the reference), or throws an exception that says why nothing was sent.
  sennit_op* post(const PlanShape& shape, const Buffers& buffers, const PostOptions& options);
  // The same for a plan on device memory. On return, the core owns `device`.
  sennit_op* post_on_device(const PlanShape& shape, const sennit_device& device, const PostOptions& options);

  void set_timeout_us(uint64_t timeout_us) { timeout_us_ = timeout_us; }
  uint64_t timeout_us() const { return timeout_us_; }
  const std::shared_ptr<GroupState>& group() const { return group_; }
  uint32_t rank() const { return sennit_comm_rank(group_->comm); }
  uint32_t world() const { return sennit_comm_size(group_->comm); }

 private:
  sennit_post_options core_options(const PlanShape& shape, const PostOptions& options) const;
  sennit_op* checked(sennit_status status, sennit_op* op, const char* reason);

  const std::shared_ptr<GroupState> group_;
  PlanCache plans_;
  std::atomic<uint64_t> timeout_us_;
};

}  // namespace sennit::runtime
