// SPDX-License-Identifier: Apache-2.0
// The thread that shows the peers that this rank lives, while none of its other threads is inside the engine.
//
// The thread runs no user code: no callback, no Python. So a rank does not look dead when its program computes for
// minutes or holds the GIL, or when a callback blocks.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace sennit {

class AnsweringThread {
 public:
  // Looks once at what peers ask. Returns the pause to the next look, in microseconds.
  using Look = std::function<uint64_t()>;

  AnsweringThread() = default;
  AnsweringThread(const AnsweringThread&) = delete;
  ~AnsweringThread() { stop(); }

  // Throws std::system_error.
  void start(Look look);
  // Waits for a look in progress. Idempotent. Any thread may call it, but not from within a look.
  void stop();

 private:
  void run(const Look& look);

  std::mutex mutex_, join_mutex_;
  std::condition_variable wake_;
  bool is_stopped_ = false;
  std::thread thread_;
};

}  // namespace sennit
