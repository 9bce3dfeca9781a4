// SPDX-License-Identifier: Apache-2.0
#include "device_copies.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "device_operation.hpp"
#include "sennit/own_thread.hpp"
#include "stand_in.hpp"

namespace sennit::runtime {
namespace {

// A batch is issued while the previous one runs, so that the stream never waits for the thread.
constexpr size_t BATCHES_AT_ONCE = 2;

bool is_over(const CopyRequest& request) { return sennit_op_status(request.op) != SENNIT_PENDING; }

void end(CopyRequest& request, const char* error) {
  sennit_copy_done(request.op, request.step, error);
  sennit_op_release(request.op);
  request.op = nullptr;
}

}  // namespace

CopyQueue::State::State(c10::Device on) : device(on) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  stream = guard.getStreamFromGlobalPool(device);
}

CopyQueue::CopyQueue(c10::Device device)
    : state_(std::make_shared<State>(device)), thread_([state = state_] { state->serve(); }) {}

CopyQueue::~CopyQueue() { stop(std::chrono::seconds(1)); }

void CopyQueue::push(CopyRequest request) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->waiting.push_back(std::move(request));
  }
  state_->changed.notify_all();
}

void CopyQueue::stop(std::chrono::microseconds limit) {
  if (!thread_.joinable()) return;
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, limit, [this] { return state_->ended; });
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

void CopyQueue::State::serve() {
  begin_thread("sennit-copy");
  const at::NoGradGuard no_grad;
  std::deque<Batch> running;
  while (true) {
    std::deque<CopyRequest> taken;
    {
      std::unique_lock<std::mutex> lock(mutex);
      if (running.empty()) changed.wait(lock, [this] { return stopping || !waiting.empty(); });
      if (running.size() < BATCHES_AT_ONCE) taken.swap(waiting);
      if (stopping && running.empty() && taken.empty()) break;
    }
    const bool is_idle = taken.empty();
    if (!is_idle) running.push_back(issue(std::move(taken)));
    if (!running.empty() && (is_idle || running.size() == BATCHES_AT_ONCE)) {
      Batch oldest = std::move(running.front());
      running.pop_front();
      finish(std::move(oldest));
    }
  }
  const std::lock_guard<std::mutex> lock(mutex);
  ended = true;
  changed.notify_all();
}

CopyQueue::Batch CopyQueue::State::issue(std::deque<CopyRequest> requests) {
  Batch batch;
  c10::OptionalStreamGuard guard;
  if (stream) guard.reset_stream(*stream);
  for (CopyRequest& request : requests) {
    // After an abort, nothing may be written to memory that the caller can see.
    if (is_over(request)) {
      end(request, nullptr);
      continue;
    }
    try {
      request.operation->copy(request, stream);
      batch.requests.push_back(std::move(request));
    } catch (const std::exception& error) {
      end(request, error.what());
    }
  }
  if (stream && !batch.requests.empty()) {
    batch.done.emplace(stream->device_type());
    batch.done->record(*stream);
  }
  return batch;
}

void CopyQueue::State::finish(Batch batch) {
  const char* failed = nullptr;
  std::string reason;
  try {
    if (batch.done) batch.done->synchronize();
  } catch (const std::exception& error) {
    reason = error.what();
    failed = reason.c_str();
  }
  for (CopyRequest& request : batch.requests) end(request, failed);
}

std::shared_ptr<DeviceCopies::Side> DeviceCopies::side_of(c10::Device device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Side>& side = sides_[device];
  if (!side) side = std::make_shared<Side>(device);
  return side;
}

at::Tensor DeviceCopies::take_scratch(c10::Device device, uint64_t size_bytes) {
  const auto needed = static_cast<int64_t>(size_bytes);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto fitting = std::find_if(kept_.begin(), kept_.end(), [&](const auto& kept) {
      return kept.first == device && kept.second.numel() >= needed;
    });
    if (fitting != kept_.end()) {
      at::Tensor scratch = std::move(fitting->second);
      kept_.erase(fitting);
      return scratch;
    }
  }
  return at::empty({needed}, at::TensorOptions().dtype(at::kByte).pinned_memory(!device.is_cpu()));
}

void DeviceCopies::give_scratch(c10::Device device, at::Tensor scratch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  kept_.emplace_back(device, std::move(scratch));
  if (kept_.size() <= KEPT_SCRATCH) return;
  kept_.erase(std::min_element(kept_.begin(), kept_.end(), [](const auto& one, const auto& other) {
    return one.second.numel() < other.second.numel();
  }));
}

void DeviceCopies::on_operation_posted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++in_flight_;
}

void DeviceCopies::on_operation_ended() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --in_flight_;
  }
  ended_.notify_all();
}

bool DeviceCopies::drain(std::chrono::microseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  return ended_.wait_for(lock, limit, [this] { return in_flight_ == 0; });
}

void DeviceCopies::stop(std::chrono::microseconds limit) {
  decltype(sides_) sides;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    sides.swap(sides_);
    kept_.clear();
  }
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (auto& [device, side] : sides) {
    for (CopyQueue* queue : {&side->to_host, &side->to_device}) {
      const auto left = deadline - std::chrono::steady_clock::now();
      queue->stop(std::max(std::chrono::duration_cast<std::chrono::microseconds>(left), std::chrono::microseconds(0)));
    }
  }
}

}  // namespace sennit::runtime
