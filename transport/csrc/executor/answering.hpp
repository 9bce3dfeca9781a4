// SPDX-License-Identifier: Apache-2.0
// The thread that shows the peers that this rank lives, while no other thread of it is inside the engine.
//
// It runs nothing of the user's: no callback, no Python. So neither a program that computes for minutes nor one that
// holds the GIL, nor a callback that blocks, makes this rank look dead.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

namespace sennit {

class AnsweringThread {
 public:
  // One look at what peers ask. Returns how long to pause, in microseconds.
  using Look = std::function<uint64_t()>;

  AnsweringThread() = default;
  AnsweringThread(const AnsweringThread&) = delete;
  ~AnsweringThread() { stop(); }

  // Throws std::system_error.
  void start(Look look);
  // Waits for a look under way. Not from within a look. Idempotent, from any thread.
  void stop();

 private:
  void run(const Look& look);

  std::mutex mutex_, join_mutex_;
  std::condition_variable wake_;
  bool is_stopped_ = false;
  std::thread thread_;
};

}  // namespace sennit
