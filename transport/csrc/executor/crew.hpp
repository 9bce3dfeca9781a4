// SPDX-License-Identifier: Apache-2.0
// The one thread that drives the operations that nobody waits for, of all groups of a process.
//
// It looks at each group that called, one round a turn, and sleeps once for all of them. A group that has had nothing
// to do for a while gets a turn only now and then while others are busy. A turn runs no user code and does not block.
#pragma once

#include <poll.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sennit {

// Wakes a thread that sleeps in poll.
struct WakeEvent {
  // The calling thread's own, whatever group it sleeps for. Null: there is no descriptor for it.
  static const WakeEvent* of_this_thread() noexcept;

  WakeEvent();  // throws std::system_error
  ~WakeEvent();
  WakeEvent(const WakeEvent&) = delete;
  WakeEvent& operator=(const WakeEvent&) = delete;
  void ring() const noexcept;
  void silence() const noexcept;
  const int fd;
};

// What the crew drives: an engine.
class Crewed {
 public:
  // What a turn leaves behind. off: nothing for the crew until the next call. moved: more may follow at once. Else how
  // to wait before the next turn.
  enum class Turn : uint8_t { off, moved, spin, yield, sleep };

  virtual Turn take_turn(bool is_first) = 0;  // the first since a call
  // Whether this engine sleeps more cheaply than in poll(2) while the crew drives nothing else.
  virtual bool sleeps_by_itself() const = 0;
  // Announces a sleep in poll(2) on the descriptors that this adds, or by itself where `fds` is null. Returns its
  // latest end. 0: there is something to do, and no sleep.
  virtual uint64_t prepare_sleep(std::vector<pollfd>* fds, uint64_t now_us) = 0;
  virtual void sleep_by_itself(uint64_t timeout_us) = 0;
  virtual void end_sleep(const std::vector<pollfd>& fds) = 0;  // after each sleep that was announced
  virtual void interrupt() = 0;                                // from another thread: ends sleep_by_itself
  virtual void relieved() = 0;                                 // the last call

 protected:
  ~Crewed() = default;
};

class Crew : public std::enable_shared_from_this<Crew> {
 public:
  class Seat {
   public:
    explicit Seat(Crewed& crewed) : hand(crewed) {}

   private:
    friend Crew;
    Crewed& hand;
    std::atomic<bool> is_called{false}, has_left{false}, is_inside{false};
    bool is_listed = false;  // among those that called or have turns
  };

  Crew() = default;
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // The first one starts the thread. Throws std::system_error.
  std::shared_ptr<Seat> join(Crewed& hand);
  // There is work. The hand's lock may be held. Throws nothing.
  void call(const std::shared_ptr<Seat>& seat) noexcept;
  // After it the crew is not inside the hand. The last one ends the thread. Idempotent. Not from within a turn.
  void relieve(const std::shared_ptr<Seat>& seat);

 private:
  struct Active {
    std::shared_ptr<Seat> seat;
    bool is_first = true;
    uint64_t rests_until_us = 0;  // while others are busy
  };
  class Inside;
  enum class Rest : uint8_t { none, idle, poll, alone };

  void work();
  bool gather(std::vector<Active>& active);
  void list(const std::shared_ptr<Seat>& seat) noexcept;
  void rest(std::vector<Active>& active, std::vector<pollfd>& fds);
  Crewed::Turn pass(std::vector<Active>& active, bool is_rested);
  bool drop(Seat& seat);
  void step_out(Seat& seat) noexcept;
  void end_rest() noexcept;

  const WakeEvent event_;
  std::mutex mutex_;
  std::condition_variable called_event_, left_event_;
  size_t members_ = 0;
  std::vector<std::shared_ptr<Seat>> called_;  // has room for all members, so that a call allocates nothing
  std::atomic<bool> has_news_{false};          // called or left
  Rest rest_ = Rest::none;
  Crewed* sleeper_ = nullptr;  // Rest::alone
  bool is_ending_ = false;     // the last one has left, and the thread has not ended yet
  std::thread thread_;
};

}  // namespace sennit
