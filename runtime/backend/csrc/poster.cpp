// SPDX-License-Identifier: Apache-2.0
#include "poster.hpp"

namespace sennit::runtime {

Poster::Poster(std::shared_ptr<GroupState> group, CompilePlan compile, size_t plan_cache_bytes, uint64_t timeout_us)
    : group_(std::move(group)), plans_(std::move(compile), plan_cache_bytes), timeout_us_(timeout_us) {}

sennit_op* Poster::post(const PlanShape& shape, const Buffers& buffers, const PostOptions& options) {
  const PlanPointer plan = plans_.get(shape);
  sennit_post_options post_options{};
  post_options.timeout_us = options.timeout_us != 0 ? options.timeout_us : timeout_us_.load();
  if (options.async) post_options.flags |= SENNIT_POST_ASYNC;
  if (shape.collective == Collective::P2P) post_options.flags |= SENNIT_POST_P2P;
  post_options.tag = options.tag;
  post_options.scalar = options.scalar;
  sennit_op* op = nullptr;
  char reason[1024];
  reason[0] = '\0';
  const sennit_status status =
      sennit_post(group_->comm, plan.get(), buffers.data(), static_cast<uint32_t>(buffers.size()), &post_options, &op,
                  reason, sizeof reason);
  if (status != SENNIT_OK) {
    if (status != SENNIT_ARGUMENT) group_->note_failure(status);
    std::rethrow_exception(make_error(status, std::string("sennit: nothing was sent: ") + reason));
  }
  return op;
}

}  // namespace sennit::runtime
