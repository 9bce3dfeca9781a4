// SPDX-License-Identifier: Apache-2.0
#include "poster.hpp"

namespace sennit::runtime {

Poster::Poster(std::shared_ptr<GroupState> group, CompilePlan compile, size_t plan_cache_bytes, uint64_t timeout_us)
    : group_(std::move(group)), plans_(std::move(compile), plan_cache_bytes), timeout_us_(timeout_us) {}

sennit_post_options Poster::core_options(const PlanShape& shape, const PostOptions& options) const {
  sennit_post_options core{};
  core.timeout_us = options.timeout_us != 0 ? options.timeout_us : timeout_us_.load();
  if (options.async) core.flags |= SENNIT_POST_ASYNC;
  if (shape.collective == Collective::P2P) core.flags |= SENNIT_POST_P2P;
  core.tag = options.tag;
  core.scalar = 1.0;  // a factor of PREMUL_SUM has been applied (scaled_copy)
  if (shape.posts_counts()) {
    core.counts = shape.counts.data();
    core.count_count = static_cast<uint32_t>(shape.counts.size());
  }
  return core;
}

sennit_op* Poster::checked(sennit_status status, sennit_op* op, const char* reason) {
  if (status == SENNIT_OK) return op;
  if (status != SENNIT_ARGUMENT) group_->note_failure(status);
  std::rethrow_exception(make_error(status, std::string("sennit: nothing was sent: ") + reason));
}

sennit_op* Poster::post(const PlanShape& shape, const Buffers& buffers, const PostOptions& options) {
  const PlanPointer plan = plans_.get(shape);
  const sennit_post_options core = core_options(shape, options);
  sennit_op* op = nullptr;
  char reason[1024];
  reason[0] = '\0';
  const sennit_status status = sennit_post(group_->comm, plan.get(), buffers.data(),
                                           static_cast<uint32_t>(buffers.size()), &core, &op, reason, sizeof reason);
  return checked(status, op, reason);
}

sennit_op* Poster::post_on_device(const PlanShape& shape, const sennit_device& device, const PostOptions& options) {
  const PlanPointer plan = plans_.get(shape);
  const sennit_post_options core = core_options(shape, options);
  sennit_op* op = nullptr;
  char reason[1024];
  reason[0] = '\0';
  const sennit_status status =
      sennit_post_on_device(group_->comm, plan.get(), &device, &core, &op, reason, sizeof reason);
  return checked(status, op, reason);
}

}  // namespace sennit::runtime
