// SPDX-License-Identifier: Apache-2.0
// The threads that call what operations call when they have ended, for all groups of a process.
//
// These threads hold no role and no lock, so a callback may do anything: wait for other operations, post, take locks,
// sleep, throw, shut groups down. No other thread of the transport, and no call of the user, runs a callback of an
// operation that was in flight.
//
// Callbacks run one after the other, in the order in which their operations ended. But a callback may wait for what
// another one does, above all for a future, which the callback of its operation completes:
//   - Callbacks have levels. One that was asked for within a callback has the next higher level. A callback stands
//     aside where it waits for an operation or asks for a callback. From then on those of higher levels run beside it.
//     Those of its own level still wait until it has returned, so that what each posts stays together.
//   - Whatever a callback does, it holds up no other one for longer than HELD_US.
// Threads start when they are needed, and end when no group is left.
#pragma once

#include <signal.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

namespace sennit {

class Operation;

class Callbacks : public std::enable_shared_from_this<Callbacks> {
 public:
  // A group's part.
  class Member {
    friend Callbacks;
    bool is_in = false;
    uint32_t open = 0;  // operations that were added, and whose callbacks have not returned
  };

  // Much longer than a callback in Python waits for the GIL (5 ms for each thread that wants it).
  static constexpr uint64_t HELD_US = 200'000;

  // Idempotent. Starts a thread if there is none. Throws std::system_error, and the next `add` tries again.
  void join(Member& member);
  // Idempotent. Idle threads of the last member have ended when it returns.
  void leave(Member& member);
  // Calls the operation's callbacks, then releases it. A lock of the caller may be held.
  void add(Member& member, Operation& operation) noexcept;
  // Waits until the callbacks of all that was added have returned, except those in which the caller is. False: some
  // have not within `limit_us`.
  bool wait(const Member& member, uint64_t limit_us);
  // The calling thread may block now. Does nothing outside a callback.
  static void stand_aside() noexcept;
  // The operation in whose callbacks the calling thread is. Null outside a callback.
  static Operation* operation_here() noexcept;
  // The operation's callback is asked for here. Sets its level.
  void ask(Operation& operation) noexcept;
  // Whether the operation's callbacks wait for an operation, as far as is known, or do not run. If they asked for
  // callbacks, they may wait for these.
  bool is_waiting(const Operation& operation);

  // Lives while a callback waits for an operation. Does nothing outside a callback.
  class Wait {
   public:
    Wait() noexcept;
    ~Wait();
    Wait(const Wait&) = delete;
  };

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Turn;
  struct Queue {
    Operation* first = nullptr;
    Operation* last = nullptr;
  };
  class Called;

  void start();
  void start_if_needed() noexcept;
  void work();
  bool take(Lock& lock, Turn& turn);
  Queue* highest() noexcept;
  uint64_t begins_at_us(const Queue& queue) const noexcept;
  void tell_others() noexcept;

  // Deeper callbacks share the last one, where HELD_US alone helps.
  static constexpr uint32_t LEVELS = 32;
  static constexpr uint32_t slot_of(uint32_t level) { return level < LEVELS ? level : LEVELS - 1; }
  // So many threads stay while there is nothing to do: one for the next callback, one in case that it blocks.
  static constexpr uint32_t KEPT_IDLE = 2;

  std::mutex mutex_;
  std::condition_variable added_event_, returned_event_;
  std::array<Queue, LEVELS> queues_{};
  std::array<uint32_t, LEVELS> asked_{};  // callbacks that were asked for within callbacks, and have not returned
  Turn* running_ = nullptr;               // a list
  uint32_t members_ = 0;
  uint32_t threads_ = 0;
  uint32_t idle_ = 0;
  sigset_t blocked_signals_{};  // in the thread that made the newest group
  bool is_watched_ = false;     // an idle thread looks whether a callback is held up for too long
};

}  // namespace sennit
