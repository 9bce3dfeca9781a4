// SPDX-License-Identifier: Apache-2.0
// Operations on device memory: when they begin, when they send messages, and what follows when a copy ends.
#include "executor/engine.hpp"

namespace sennit {
namespace {

// Each operation holds its own scratch. With this many, one can copy while another uses the network.
constexpr uint32_t DEVICE_COLLECTIVES_AT_ONCE = 4;

}  // namespace

// In the group's order, which is the same on all ranks. So the oldest operation runs everywhere and can end. A
// collective with loans on host memory keeps the order too: lanes grant loans in the order in which they are asked for,
// and a younger operation with all loans of a lane would hold up an older one.
bool Engine::begin_held() {
  bool began = false;
  while (!held_.empty()) {
    Operation& next = *held_.front();
    if (next.on_device()) {
      if (device_collectives_running_ == DEVICE_COLLECTIVES_AT_ONCE) break;
      ++device_collectives_running_;
    }
    held_.pop_front();
    begin(next);
    began = true;
  }
  return began;
}

bool Engine::may_send(const Operation& operation) const {
  for (const Operation* earlier : unsent_) {
    if (earlier == &operation) return true;
    if (earlier->shares_order_with(operation) && !earlier->is_sent()) return false;
  }
  return true;
}

bool Engine::send_held() {
  bool sent = false;
  for (Operation* operation : unsent_) {
    if (!operation->holds_send() || !may_send(*operation)) continue;
    operation->dispatch_held_send();
    sent = true;
  }
  std::erase_if(unsent_, [](const Operation* operation) { return operation->is_sent(); });
  return sent;
}

void Engine::copy_done(Operation& operation, uint32_t step, const char* error) {
  Lock lock = enter();
  if (operation.status() != SENNIT_PENDING) return;
  guarded([&] {
    if (error != nullptr) throw DeviceError(operation.describe() + ": a copy between host and device failed: " + error);
    operation.on_copy_done(step);
    return operation.run_ready(false);
  });
  if (ended_ != SENNIT_OK) {
    let_go(lock);
    return;
  }
  // The driver does the rest.
  if (sleeping_ != Sleep::awake) wake();
  if (background_operations_ != 0 && !driving_) call_crew();
}

}  // namespace sennit
