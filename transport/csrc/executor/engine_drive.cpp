// SPDX-License-Identifier: Apache-2.0
// Which thread drives the engine: a waiting thread, the background thread or, to answer peers, the answering thread.
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>

#include "executor/engine.hpp"

namespace sennit {
namespace {

// How often a sleeping driver checks for dead peers and deadlines.
constexpr uint64_t SLEEP_MAX_US = 50'000;
// An idle communicator on a network must still acknowledge what arrives late, since its last acknowledgement may be
// lost, and answer peers that wait for it. The pause grows to ten times this while nothing arrives.
constexpr uint64_t LINGER_US = 5'000;
// A driver that has made no round for this long is in a callback.
constexpr uint64_t DRIVER_AWAY_US = 2 * SLEEP_MAX_US;
// Peers in shared memory see a counter grow this often: a fifth of the smallest peer timeout.
constexpr uint64_t BEAT_US = 100'000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

sennit_status Engine::wait(Operation& operation, uint64_t timeout_us) {
  if (operation.status() != SENNIT_PENDING) return operation.status();
  Lock lock = enter();
  const Waiting waiting(*this);
  const uint64_t give_up_us = timeout_us == 0 ? UINT64_MAX : clock_us() + timeout_us;
  while (operation.status() == SENNIT_PENDING && clock_us() < give_up_us) {
    if (driving_) {
      // The background thread hands the role over at its next round. Another waiter may keep the role for long.
      if (sleeping_) wake();
      role_free_.wait_for(lock, std::chrono::milliseconds(1));
      continue;
    }
    const Driving driving(*this);
    backoff_.reset();
    while (operation.status() == SENNIT_PENDING && drive_once(lock) < give_up_us) {
    }
  }
  return operation.status();
}

uint64_t Engine::drive_once(Lock& lock) {
  const uint64_t now_us = clock_us();
  backoff_.begin_round(now_us);
  const bool moved = round(now_us);
  run_callbacks(lock);
  if (moved) {
    backoff_.reset();
  } else {
    switch (backoff_.next(now_us)) {
      case Backoff::Action::spin:
        relax();
        break;
      case Backoff::Action::yield:
        lock.unlock();
        sched_yield();
        lock.lock();
        break;
      case Backoff::Action::sleep:
        sleep(lock, now_us);
        break;
    }
  }
  // A plain unlock and lock would win the race against every thread that wants to post.
  while (entering_.load(std::memory_order_relaxed) != 0) {
    lock.unlock();
    sched_yield();
    lock.lock();
  }
  return now_us;
}

void Engine::sleep(Lock& lock, uint64_t now_us) {
  const bool has_shm = shm_ && shm_->lane_count() != 0;
  const bool polls = sleeps_in_poll();
  const bool has_failed = guarded([&] {
    if (!active_.empty()) {
      for (Port* port : ports_) port->check_on_peers(now_us);
    }
    poll_fds_.clear();
    if (!polls) return false;
    poll_fds_.push_back({wake_event_.fd, POLLIN, 0});
    for (const Port* port : ports_) port->append_poll_fds(poll_fds_);
    return false;
  });
  if (has_failed) return;
  uint64_t until_us = std::min(now_us + SLEEP_MAX_US, next_deadline_us_);
  for (const Port* port : ports_) until_us = std::min(until_us, port->next_timeout_us());
  if (until_us <= now_us) return;
  const uint64_t timeout_us = until_us - now_us;
  const uint32_t ticket = has_shm ? shm_->prepare_sleep(polls ? Sleep::poll : Sleep::futex) : 0;
  // The sleep is announced. What a peer wrote before it saw the announcement must be found now.
  if (has_shm && round(now_us)) {
    shm_->cancel_sleep();
    run_callbacks(lock);
    return;
  }
  sleeping_ = true;
  if (!polls) {
    lock.unlock();
    shm_->sleep(ticket, timeout_us);
  } else {
    const timespec timeout{static_cast<time_t>(timeout_us / 1'000'000),
                           static_cast<long>(timeout_us % 1'000'000 * 1'000)};
    lock.unlock();
    ppoll(poll_fds_.data(), poll_fds_.size(), &timeout, nullptr);
    if (poll_fds_.front().revents != 0) {
      eventfd_t count;
      eventfd_read(wake_event_.fd, &count);
    }
    if (has_shm) {
      shm_->cancel_sleep();
      shm_->silence_bell();
    }
  }
  lock.lock();
  sleeping_ = false;
}

void Engine::wake() {
  if (sleeps_in_poll()) {
    eventfd_write(wake_event_.fd, 1);
  } else {
    shm_->wake();
  }
}

// Starts the background thread unless it runs already. Throws std::system_error.
void Engine::start_thread() {
  if (thread_id_ != std::thread::id() || stopping_) return;
  retain();
  try {
    thread_ = std::thread([this] {
      background();
      release();
    });
  } catch (...) {
    references_.fetch_sub(1, std::memory_order_relaxed);
    throw;
  }
  thread_id_ = thread_.get_id();
}

// Runs on the answering thread, which must not be held up, so callbacks are left to other threads. Returns the pause.
uint64_t Engine::answer() {
  if (!has_network()) {
    shm_->beat();
    return BEAT_US;
  }
  const auto round_is_due = [this](uint64_t now_us, uint64_t patience_us) {
    return now_us >= last_round_us_.load(std::memory_order_relaxed) + patience_us;
  };
  if (!round_is_due(clock_us(), LINGER_US)) return LINGER_US;
  const Lock lock = enter();
  const uint64_t now_us = clock_us();
  if (stopping_ || !round_is_due(now_us, driving_ ? DRIVER_AWAY_US : LINGER_US)) return LINGER_US;
  idle_answers_ = round(now_us) ? 0 : idle_answers_ + 1;
  if (first_settled_ != nullptr) {
    if (waiters_ != 0) role_free_.notify_all();
    background_work_.notify_one();
  }
  return LINGER_US * std::min<uint64_t>(10, 1 + idle_answers_ / 200);
}

void Engine::background() {
  Lock lock(mutex_);
  while (!stopping_) {
    // Run the callbacks of operations that the answering thread found finished.
    run_callbacks(lock);
    const bool work = background_operations_ != 0 && waiters_ == 0 && !driving_;
    if (!work) {
      if (!stopping_ && first_settled_ == nullptr) background_work_.wait(lock);
      continue;
    }
    const Driving driving(*this);
    backoff_.reset();
    while (!stopping_ && waiters_ == 0 && background_operations_ != 0) drive_once(lock);
  }
}

}  // namespace sennit
