// SPDX-License-Identifier: Apache-2.0
// The thread that shows the peers that this rank lives, while none of its other threads is inside the engine.
//
// The thread runs no user code: no callback, no Python. So a rank does not look dead when its program computes for
// minutes or holds the GIL, or when a callback blocks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace sennit {

class AnsweringThread {
 public:
  // Looks once at what peers ask. Returns the pause to the next look, in microseconds.
  using Look = std::function<uint64_t()>;

  AnsweringThread() = default;
  AnsweringThread(const AnsweringThread&) = delete;
  ~AnsweringThread() { stop(); }

  // Throws std::system_error.
  void start(Look look) {
    thread_ = std::thread([this, look = std::move(look)] { run(look); });
  }
  // Waits for a look in progress. Idempotent. Any thread may call it, but not from within a look.
  void stop() {
    {
      const std::lock_guard lock(mutex_);
      is_stopped_ = true;
    }
    wake_.notify_all();
    const std::lock_guard lock(join_mutex_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run(const Look& look) {
    uint64_t pause_us = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        if (wake_.wait_for(lock, std::chrono::microseconds(pause_us), [this] { return is_stopped_; })) return;
      }
      pause_us = look();
    }
  }

  std::mutex mutex_, join_mutex_;
  std::condition_variable wake_;
  bool is_stopped_ = false;
  std::thread thread_;
};

}  // namespace sennit
