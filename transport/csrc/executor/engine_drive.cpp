// SPDX-License-Identifier: Apache-2.0
// Which thread drives the engine: a waiting thread, the crew or, to answer peers, the answering thread.
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
// A thread for which there is no event sleeps so long.
constexpr uint64_t BLIND_SLEEP_US = 1'000;
// An idle communicator on a network must still acknowledge what arrives late, since its last acknowledgement may be
// lost, and answer peers that wait for it. The pause grows to ten times this while nothing arrives.
constexpr uint64_t LINGER_US = 5'000;
// Peers in shared memory see a counter grow this often: a fifth of the smallest peer timeout.
constexpr uint64_t BEAT_US = 100'000;

}  // namespace

sennit_status Engine::wait(Operation& operation, uint64_t timeout_us) {
  if (Callbacks::operation_here() != nullptr) {
    Lock lock = enter();
    if (const Caller caller = caller_here(); caller.place != nullptr) pull_forward(operation, *caller.place);
    let_go(lock);
  }
  if (operation.status() != SENNIT_PENDING) return operation.status();
  const Callbacks::Wait in_callback;
  Lock lock = enter();
  const Waiting waiting(*this);
  const uint64_t give_up_us = timeout_us == 0 ? UINT64_MAX : clock_us() + timeout_us;
  while (operation.status() == SENNIT_PENDING && clock_us() < give_up_us) {
    if (driving_) {
      // The crew hands the role over at its next round. Another waiter may keep the role for long.
      if (sleeping_ != Sleep::awake) wake();
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
  let_go(lock);
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

// Announces a sleep in poll(2) on `fds`, or on the futex where there are none. Returns its latest end. 0: there is
// something to do, and no sleep. The lock is held.
uint64_t Engine::announce_sleep(std::vector<pollfd>* fds, uint64_t now_us) {
  const bool has_shm = shm_ && shm_->lane_count() != 0;
  const bool has_failed = guarded([&] {
    if (!active_.empty()) {
      for (Port* port : ports_) port->check_on_peers(now_us);
    }
    if (fds == nullptr) return false;
    wake_event_ = WakeEvent::of_this_thread();
    // The crew sleeps for several groups.
    const int event_fd = wake_event_ != nullptr ? wake_event_->fd : -1;
    const auto known = std::find_if(fds->begin(), fds->end(), [&](const pollfd& one) { return one.fd == event_fd; });
    wake_slot_ = static_cast<size_t>(known - fds->begin());
    if (known == fds->end()) fds->push_back({event_fd, POLLIN, 0});
    for (const Port* port : ports_) port->append_poll_fds(*fds);
    return false;
  });
  if (has_failed) return 0;
  uint64_t until_us = std::min(now_us + SLEEP_MAX_US, next_deadline_us_);
  for (const Port* port : ports_) until_us = std::min(until_us, port->next_timeout_us());
  if (fds != nullptr && wake_event_ == nullptr) until_us = std::min(until_us, now_us + BLIND_SLEEP_US);
  if (until_us <= now_us) return 0;
  const Sleep how = fds != nullptr ? Sleep::poll : Sleep::futex;
  ticket_ = has_shm ? shm_->prepare_sleep(how) : 0;
  // The sleep is announced. What a peer wrote before it saw the announcement must be found now.
  if (has_shm && round(now_us)) {
    shm_->cancel_sleep();
    return 0;
  }
  sleeping_ = how;
  return until_us;
}

void Engine::close_sleep(const std::vector<pollfd>& fds) {
  if (sleeping_ == Sleep::poll) {
    if (wake_event_ != nullptr && fds[wake_slot_].revents != 0) wake_event_->silence();
    if (shm_ && shm_->lane_count() != 0) {
      shm_->cancel_sleep();
      shm_->silence_bell();
    }
  }
  sleeping_ = Sleep::awake;
}

void Engine::sleep(Lock& lock, uint64_t now_us) {
  const bool polls = sleeps_in_poll();
  poll_fds_.clear();
  const uint64_t until_us = announce_sleep(polls ? &poll_fds_ : nullptr, now_us);
  if (until_us == 0) {
    let_go(lock);
    return;
  }
  const uint64_t timeout_us = until_us - now_us;
  lock.unlock();
  if (polls) {
    const timespec timeout{static_cast<time_t>(timeout_us / 1'000'000),
                           static_cast<long>(timeout_us % 1'000'000 * 1'000)};
    ppoll(poll_fds_.data(), poll_fds_.size(), &timeout, nullptr);
  } else {
    shm_->sleep(ticket_, timeout_us);
  }
  lock.lock();
  close_sleep(poll_fds_);
}

void Engine::wake() {
  if (sleeping_ == Sleep::poll) {
    if (wake_event_ != nullptr) wake_event_->ring();
  } else {
    shm_->wake();
  }
}

// The lock is held.
void Engine::join_crew() {
  if (seat_ || stopping_) return;
  std::shared_ptr<Crew> crew = of_process<Crew>();
  seat_ = crew->join(*this);
  crew_ = std::move(crew);
  retain();
}

// The lock is held.
void Engine::join_callbacks() {
  if (!stopping_) callbacks_->join(called_back_);
}

// The lock is held.
void Engine::call_crew() noexcept {
  if (seat_) crew_->call(seat_);
}

// Of several callers, each returns when no other thread is inside the engine.
void Engine::leave_threads() {
  Lock lock = enter();
  const std::shared_ptr<Answering> answering = answering_;
  const std::shared_ptr<Crew> crew = crew_;
  const std::shared_ptr<Crew::Seat> seat = seat_;
  lock.unlock();
  callbacks_->leave(called_back_);
  if (answering) answering->leave(answer_);
  if (seat) crew->relieve(seat);
}

// Runs on the answering thread, which must not be held up. Returns the pause.
uint64_t Engine::answer() {
  if (!has_network()) {
    shm_->beat();
    return BEAT_US;
  }
  const auto round_is_due = [this](uint64_t now_us) {
    return now_us >= last_round_us_.load(std::memory_order_relaxed) + LINGER_US;
  };
  if (!round_is_due(clock_us())) return LINGER_US;
  // Other groups wait for their answers too. A thread that holds the lock for long is at work.
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) return LINGER_US;
  const uint64_t now_us = clock_us();
  if (stopping_ || driving_ || !round_is_due(now_us)) return LINGER_US;
  idle_answers_ = round(now_us) ? 0 : idle_answers_ + 1;
  let_go(lock);
  return LINGER_US * std::min<uint64_t>(10, 1 + idle_answers_ / 200);
}

// One round, unless somebody else drives or waits. Does not block.
Engine::Turn Engine::take_turn(bool is_first) {
  // Taking the lock would win the race against every thread that wants to post.
  if (entering_.load(std::memory_order_relaxed) != 0) return Turn::yield;
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) return Turn::yield;
  if (stopping_ || background_operations_ == 0 || waiters_ != 0 || driving_) return Turn::off;
  const Driving driving(*this);
  if (is_first) backoff_.reset();
  const uint64_t now_us = clock_us();
  backoff_.begin_round(now_us);
  const bool moved = round(now_us);
  let_go(lock);
  if (moved) {
    backoff_.reset();
    return Turn::moved;
  }
  switch (backoff_.next(now_us)) {
    case Backoff::Action::spin:
      return Turn::spin;
    case Backoff::Action::yield:
      return Turn::yield;
    case Backoff::Action::sleep:
      break;
  }
  return Turn::sleep;
}

uint64_t Engine::prepare_sleep(std::vector<pollfd>* fds, uint64_t now_us) {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock || entering_.load(std::memory_order_relaxed) != 0) return 0;
  if (stopping_ || background_operations_ == 0 || waiters_ != 0 || driving_) return 0;
  const uint64_t until_us = announce_sleep(fds, now_us);
  driving_ = until_us != 0;
  if (until_us == 0) let_go(lock);
  return until_us;
}

void Engine::end_sleep(const std::vector<pollfd>& fds) {
  const Lock lock(mutex_);
  close_sleep(fds);
  driving_ = false;
  if (waiters_ != 0) role_free_.notify_all();
}

}  // namespace sennit
