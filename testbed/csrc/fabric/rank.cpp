// SPDX-License-Identifier: Apache-2.0
#include "fabric/rank.hpp"

#include <algorithm>
#include <stdexcept>

namespace sennit::fabric {

void RankLane::use() {
  if (base_ == nullptr) connections_.connect(rank_, peer_);
  connections_.touch(endpoint_);
}

// The mailbox tries again whenever the connection was served. So only the first refusal touches it.
bool RankLane::send_eager(const MessageHeader& header, uint32_t flags, const void* data) {
  if (base_ == nullptr) connections_.connect(rank_, peer_);
  const bool is_sent = base_->send_eager(header, flags, data);
  if (is_sent || !is_blocked_) connections_.touch(endpoint_);
  is_blocked_ = !is_sent;
  return is_sent;
}

void RankLane::advertise(uint64_t receive_id, const MessageHeader& header, void* destination) {
  use();
  open_receives_.push_back({receive_id, header.size_bytes});
  base_->advertise(receive_id, header, destination);
}

// The advert came through the connection, which lives as long as the peer's receive is open.
void RankLane::transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes, Use how) {
  use();
  transfers_.push_back({send_id, connections_.now_us()});
  base_->transfer(send_id, advert_id, data, size_bytes, how);
}

bool RankLane::release(uint64_t loan_id) {
  if (loan_id == 0) return true;
  use();
  --loans_;
  return base_->release(loan_id);
}

bool RankLane::on_eager(uint32_t peer, const MessageHeader& header, uint32_t flags, const std::byte* data) {
  is_deferred_ = !mailbox_.on_eager(peer, header, flags, data);
  connections_.touch_rank(rank_);
  if (!is_deferred_ && flags == EAGER_DATA) count(header.size_bytes);
  return !is_deferred_;
}

void RankLane::on_advert(uint32_t peer, const MessageHeader& header, uint64_t advert_id) {
  mailbox_.on_advert(peer, header, advert_id);
  connections_.touch_rank(rank_);
}

void RankLane::on_received(uint64_t receive_id, const std::byte* data, uint64_t loan_id) {
  const auto open = std::ranges::find(open_receives_, receive_id, &OpenReceive::id);
  count(open->size_bytes);
  open_receives_.erase(open);
  if (loan_id != 0) ++loans_;
  mailbox_.on_received(receive_id, data, loan_id);
  connections_.touch_rank(rank_);
}

void RankLane::on_sent(uint64_t send_id) {
  const auto transfer = std::ranges::find(transfers_, send_id, &Transfer::id);
  connections_.on_message_us(connections_.now_us() - transfer->began_us);
  transfers_.erase(transfer);
  mailbox_.on_sent(send_id);
  connections_.touch_rank(rank_);
}

void RankLane::on_peer_lost(uint32_t peer, std::string reason) {
  mailbox_.on_peer_lost(peer, std::move(reason));
  connections_.touch_rank(rank_);
}

Rank::Rank(Connections& connections, std::unique_ptr<Plan> plan, std::span<const uint64_t> counts)
    : OperationHost(plan->rank, plan->world, 1, 0), plan_(plan.release()) {
  try {
    if (plan_->on_device) throw std::invalid_argument("the plan is for device memory; allowed: host memory");
    sizes_ = plan_->sizes_of(counts);
  } catch (...) {
    delete plan_;
    throw;
  }
  // Data that is left out needs no arithmetic.
  std::ranges::fill(plan_->kernels, [](const FoldArguments&) {});
  const RunSizes& sizes = *sizes_;
  for (const Step& step : plan_->steps) {
    if (step.kind != StepKind::send && step.kind != StepKind::receive) continue;
    std::unique_ptr<RankLane>& lane = lanes_[step.peer];
    if (!lane) {
      lane = std::make_unique<RankLane>(connections, mailbox_, plan_->rank, step.peer);
      mailbox_.set_lane(step.peer, lane.get());
    }
    if (step.kind != StepKind::send) continue;
    Sent& sent = sent_[step.peer];
    ++sent.messages;
    sent.bytes += sizes.bytes(step.size_bytes);
  }
}

Rank::~Rank() {
  mailbox_.abandon();
  if (operation_ != nullptr) operation_->release();
  if (plan_->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete plan_;
}

uint64_t Rank::memory_bytes() const {
  const RunSizes& sizes = *sizes_;
  uint64_t most_bytes = 1;
  for (uint32_t buffer = 0; buffer < plan_->buffer_count; ++buffer)
    most_bytes = std::max(most_bytes, sizes.buffer_extents[buffer]);
  return most_bytes;
}

void Rank::post(std::byte* memory) {
  const std::vector<sennit_buffer> buffers(plan_->buffer_count, {memory, memory_bytes()});
  sennit_post_options options{};
  operation_ = new Operation(*this, *plan_, {buffers}, options, 1, sizes_);
  operation_->start();
}

bool Rank::run(uint64_t now_ticks) {
  mailbox_.progress(now_ticks);
  while (operation_->run_ready(true)) {
  }
  if (is_done_ || !operation_->finished_steps()) return false;
  return is_done_ = true;
}

std::string Rank::failure() {
  const MailboxFailure* failure = mailbox_.failure();
  if (failure == nullptr) return {};
  return "host " + std::to_string(plan_->rank) + ": host " + std::to_string(failure->peer) + " " + failure->reason;
}

}  // namespace sennit::fabric
