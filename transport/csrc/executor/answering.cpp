// SPDX-License-Identifier: Apache-2.0
#include "executor/answering.hpp"

#include <chrono>
#include <utility>

namespace sennit {

void AnsweringThread::start(Look look) {
  thread_ = std::thread([this, look = std::move(look)] { run(look); });
}

void AnsweringThread::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
  }
  wake_.notify_all();
  const std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

void AnsweringThread::run(const Look& look) {
  uint64_t pause_us = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (wake_.wait_for(lock, std::chrono::microseconds(pause_us), [this] { return is_stopped_; })) return;
    }
    pause_us = look();
  }
}

}  // namespace sennit
