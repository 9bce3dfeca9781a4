// SPDX-License-Identifier: Apache-2.0
#include "executor/callbacks.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "executor/clock.hpp"
#include "executor/engine.hpp"
#include "executor/operation.hpp"
#include "ports/of_process.hpp"

namespace sennit {

// The callbacks of one operation, in one thread.
struct Callbacks::Turn {
  Callbacks& callbacks;
  Operation* operation = nullptr;
  const Member* member = nullptr;
  uint32_t level = 0;
  bool stands_aside = false;
  std::atomic<bool> waits{false};
  uint64_t began_us = 0;
  uint64_t forks = 0;
  Turn* next = nullptr;

  // The calling thread's turn. Null outside callbacks, also in a child of fork, which has none of these threads.
  static Turn* here() noexcept { return current != nullptr && current->forks == fork_count() ? current : nullptr; }
  static thread_local Turn* current;
};
thread_local Callbacks::Turn* Callbacks::Turn::current = nullptr;

// A thread in callbacks. A callback may end its thread, as Python does at the end of a process: the destructor does
// what remains to be done.
class Callbacks::Called {
 public:
  Called(Lock& lock, Turn& turn) : lock_(lock), turn_(turn) {
    Turn::current = &turn;
    lock_.unlock();
  }
  ~Called() {
    Callbacks& callbacks = turn_.callbacks;
    Operation* const operation = turn_.operation;
    Turn::current = nullptr;
    lock_.lock();
    if (operation->callback_level_ != 0) --callbacks.asked_[slot_of(operation->callback_level_)];
    if (--operation->callbacks_of_->open <= 1) callbacks.returned_event_.notify_all();
    Turn** link = &callbacks.running_;
    while (*link != &turn_) link = &(*link)->next;
    *link = turn_.next;
    if (has_returned) {
      ++callbacks.idle_;
    } else {
      --callbacks.threads_;
      callbacks.tell_others();
    }
    // Perhaps the last reference to its group.
    lock_.unlock();
    operation->release();
    lock_.lock();
  }
  Called(const Called&) = delete;

  bool has_returned = false;

 private:
  Lock& lock_;
  Turn& turn_;
};

void Callbacks::join(Member& member) {
  const std::lock_guard lock(mutex_);
  pthread_sigmask(SIG_BLOCK, nullptr, &blocked_signals_);
  if (!std::exchange(member.is_in, true)) ++members_;
  if (threads_ == 0) start();
}

void Callbacks::leave(Member& member) {
  Lock lock(mutex_);
  if (!std::exchange(member.is_in, false) || --members_ != 0) return;
  added_event_.notify_all();
  returned_event_.wait(lock, [this] { return idle_ == 0 || members_ != 0 || highest() != nullptr; });
}

// The lock is held. The new thread counts as idle at once, so that no second one is started in its place.
void Callbacks::start() {
  std::thread([self = shared_from_this()] { self->work(); }).detach();
  ++threads_;
  ++idle_;
}

// The lock is held.
void Callbacks::start_if_needed() noexcept {
  if (highest() == nullptr || idle_ != 0) return;
  try {
    start();
  } catch (const std::exception&) {  // whoever adds the next one tries again
  }
}

// Something may begin now, or later without a call. The lock is held.
void Callbacks::tell_others() noexcept {
  const Queue* const queue = highest();
  if (queue == nullptr) return;
  start_if_needed();
  if (!is_watched_ || begins_at_us(*queue) == 0) added_event_.notify_one();
}

void Callbacks::add(Member& member, Operation& operation) noexcept {
  const std::lock_guard lock(mutex_);
  Queue& queue = queues_[slot_of(operation.callback_level_)];
  operation.next_settled_ = nullptr;
  (queue.last != nullptr ? queue.last->next_settled_ : queue.first) = &operation;
  queue.last = &operation;
  operation.callbacks_of_ = &member;
  ++member.open;
  tell_others();
}

bool Callbacks::wait(const Member& member, uint64_t limit_us) {
  Lock lock(mutex_);
  start_if_needed();
  const Turn* const turn = Turn::here();
  const uint32_t own = turn != nullptr && turn->member == &member ? 1 : 0;
  return returned_event_.wait_for(lock, std::chrono::microseconds(limit_us), [&] { return member.open <= own; });
}

void Callbacks::stand_aside() noexcept {
  Turn* const turn = Turn::here();
  if (turn == nullptr || turn->stands_aside) return;
  const std::lock_guard lock(turn->callbacks.mutex_);
  turn->stands_aside = true;
  turn->callbacks.tell_others();
}

Operation* Callbacks::operation_here() noexcept {
  const Turn* const turn = Turn::here();
  return turn == nullptr ? nullptr : turn->operation;
}

void Callbacks::ask(Operation& operation) noexcept {
  const Turn* const turn = Turn::here();
  if (turn == nullptr) return;
  const std::lock_guard lock(mutex_);
  operation.callback_level_ = turn->level + 1;
  ++asked_[slot_of(turn->level + 1)];
}

bool Callbacks::is_waiting(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  const Turn* turn = running_;
  while (turn != nullptr && turn->operation != &operation) turn = turn->next;
  if (turn == nullptr || turn->waits.load(std::memory_order_relaxed)) return true;
  const auto deeper = asked_.begin() + slot_of(turn->level) + 1;
  return std::any_of(deeper, asked_.end(), [](uint32_t count) { return count != 0; });
}

Callbacks::Wait::Wait() noexcept {
  stand_aside();
  if (Turn* const turn = Turn::here()) turn->waits.store(true, std::memory_order_relaxed);
}

Callbacks::Wait::~Wait() {
  if (Turn* const turn = Turn::here()) turn->waits.store(false, std::memory_order_relaxed);
}

// The queue that may begin first. Null: nothing waits. The lock is held.
Callbacks::Queue* Callbacks::highest() noexcept {
  for (uint32_t level = LEVELS; level-- != 0;)
    if (queues_[level].first != nullptr) return &queues_[level];
  return nullptr;
}

// When the first operation of the queue may begin, whatever the running callbacks do. 0: now. The lock is held.
uint64_t Callbacks::begins_at_us(const Queue& queue) const noexcept {
  const auto level = static_cast<uint32_t>(&queue - queues_.data());
  uint64_t at_us = 0;
  for (const Turn* turn = running_; turn != nullptr; turn = turn->next)
    if (!turn->stands_aside || level <= turn->level) at_us = std::max(at_us, turn->began_us + HELD_US);
  return at_us;
}

void Callbacks::work() {
  // For lent_time.hpp this is no thread of the transport: callbacks are the user's code, and their waits are lent time.
  pthread_setname_np(pthread_self(), "sennit-callback");
  Turn turn{*this};
  turn.forks = fork_count();
  Lock lock(mutex_);
  // A thread of the transport may have started this one, and what it blocks goes on to processes that callbacks start.
  pthread_sigmask(SIG_SETMASK, &blocked_signals_, nullptr);
  while (take(lock, turn)) {
    Called called(lock, turn);
    turn.operation->engine().run_callbacks(*turn.operation);
    called.has_returned = true;
  }
}

// Waits for an operation whose callbacks may begin. False: the thread is not needed any more. It counts as idle until
// it returns.
bool Callbacks::take(Lock& lock, Turn& turn) {
  Queue* queue = nullptr;
  uint64_t now_us = 0;
  for (;;) {
    queue = highest();
    now_us = clock_us();
    const uint64_t begins_us = queue != nullptr ? begins_at_us(*queue) : UINT64_MAX;
    if (begins_us <= now_us) break;
    if (idle_ > KEPT_IDLE || (queue == nullptr && members_ == 0)) {
      --idle_;
      --threads_;
      returned_event_.notify_all();
      return false;
    }
    if (queue == nullptr || is_watched_) {
      added_event_.wait(lock);
    } else {
      is_watched_ = true;
      added_event_.wait_for(lock, std::chrono::microseconds(begins_us - now_us));
      is_watched_ = false;
    }
  }
  --idle_;
  turn.operation = queue->first;
  turn.member = queue->first->callbacks_of_;
  turn.level = static_cast<uint32_t>(queue - queues_.data());
  turn.stands_aside = false;
  turn.began_us = now_us;
  turn.next = std::exchange(running_, &turn);
  queue->first = queue->first->next_settled_;
  if (queue->first == nullptr) queue->last = nullptr;
  tell_others();
  return true;
}

}  // namespace sennit
