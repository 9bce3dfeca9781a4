// SPDX-License-Identifier: Apache-2.0
// The thread that shows the peers of all groups that this rank lives, while no other thread is inside an engine.
//
// The thread runs no user code: no callback, no Python. So a rank does not look dead when its program computes for
// minutes or holds the GIL, or when a callback blocks. There is one for all groups of a process, so no look may block.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sennit {

class Answering : public std::enable_shared_from_this<Answering> {
 public:
  // Looks once at what peers ask. Returns the pause to the next look, in microseconds.
  using Look = std::function<uint64_t()>;
  struct Member {
    Look look;
    uint64_t due_us = 0;
    bool is_looking = false;
  };

  // The first look comes at once. The first member starts the thread. Throws std::system_error.
  std::shared_ptr<Member> join(Look look);
  // Waits for the member's look in progress, for no other. The last member ends the thread. Idempotent. Any thread may
  // call it, but not from within a look.
  void leave(const std::shared_ptr<Member>& member);

 private:
  void run(uint64_t number);
  uint64_t look_around(std::unique_lock<std::mutex>& lock, uint64_t number);

  std::mutex mutex_;
  std::condition_variable wake_, looked_;
  std::vector<std::shared_ptr<Member>> members_;
  uint64_t number_ = 0;  // of the thread that works; an older one ends
  std::thread thread_;
};

}  // namespace sennit
