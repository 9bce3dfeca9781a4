// SPDX-License-Identifier: Apache-2.0
#include "executor/crew.hpp"

#include <sched.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <new>
#include <system_error>

#include "executor/backoff.hpp"
#include "executor/clock.hpp"
#include "executor/lent_time.hpp"
#include "ports/of_process.hpp"

namespace sennit {
namespace {

// A group with nothing to do gets a turn this often while others are busy.
constexpr uint64_t REST_US = 1'000;

}  // namespace

WakeEvent::WakeEvent() : fd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}
WakeEvent::~WakeEvent() { ::close(fd); }
const WakeEvent* WakeEvent::of_this_thread() noexcept {
  struct Mine {
    uint64_t forks = 0;
    std::unique_ptr<const WakeEvent> event;
  };
  thread_local Mine mine;
  try {
    // A child shares its parent's events, and so would wake it.
    if (const uint64_t forks = fork_count(); mine.event == nullptr || mine.forks != forks) {
      mine.event = std::make_unique<const WakeEvent>();
      mine.forks = forks;
    }
  } catch (const std::exception&) {
    return nullptr;
  }
  return mine.event.get();
}
void WakeEvent::ring() const noexcept { eventfd_write(fd, 1); }
void WakeEvent::silence() const noexcept {
  eventfd_t count;
  eventfd_read(fd, &count);
}

// The crew inside a hand.
class Crew::Inside {
 public:
  Inside(Crew& crew, Seat& seat) : crew_(crew), seat_(seat) { seat_.is_inside = true; }
  ~Inside() { crew_.step_out(seat_); }
  Inside(const Inside&) = delete;
  explicit operator bool() const { return !seat_.has_left; }

 private:
  Crew& crew_;
  Seat& seat_;
};

std::shared_ptr<Crew::Seat> Crew::join(Crewed& hand) {
  auto seat = std::make_shared<Seat>(hand);
  std::unique_lock lock(mutex_);
  left_event_.wait(lock, [this] { return !is_ending_; });
  called_.reserve(members_ + 1);
  if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->work(); });
  ++members_;
  return seat;
}

void Crew::step_out(Seat& seat) noexcept {
  seat.is_inside = false;
  if (!seat.has_left) return;
  const std::lock_guard lock(mutex_);
  left_event_.notify_all();
}

// The lock is held.
void Crew::list(const std::shared_ptr<Seat>& seat) noexcept {
  seat->is_called = true;
  seat->is_listed = true;
  called_.push_back(seat);
  has_news_ = true;
}

// The lock is held.
void Crew::end_rest() noexcept {
  has_news_ = true;
  if (rest_ == Rest::idle) called_event_.notify_all();
  if (rest_ == Rest::poll) event_.ring();
  if (rest_ == Rest::alone) sleeper_->interrupt();
}

void Crew::call(const std::shared_ptr<Seat>& seat) noexcept {
  if (seat->is_called.exchange(true)) return;
  const std::lock_guard lock(mutex_);
  if (seat->has_left) return;
  if (!seat->is_listed) list(seat);
  end_rest();
}

void Crew::relieve(const std::shared_ptr<Seat>& seat) {
  std::unique_lock lock(mutex_);
  const bool is_first = !seat->has_left.exchange(true);
  if (is_first) {
    --members_;
    end_rest();
  }
  left_event_.wait(lock, [&] { return !seat->is_inside; });
  if (is_first && members_ == 0 && thread_.joinable()) {
    is_ending_ = true;
    end_rest();
    lock.unlock();
    thread_.join();
    lock.lock();
    called_.clear();
    is_ending_ = false;
    left_event_.notify_all();
  }
  lock.unlock();
  if (is_first) seat->hand.relieved();
}

void Crew::work() {
  begin_own_thread("sennit-crew");
  std::vector<Active> active;
  std::vector<pollfd> fds;
  bool is_rested = true;
  while (gather(active)) {
    const Crewed::Turn next = pass(active, is_rested);
    is_rested = false;
    switch (next) {
      case Crewed::Turn::spin:
        relax();
        break;
      case Crewed::Turn::yield:
        sched_yield();
        break;
      case Crewed::Turn::sleep:
        rest(active, fds);
        is_rested = true;
        break;
      case Crewed::Turn::off:
      case Crewed::Turn::moved:
        break;
    }
  }
}

// Takes over the seats that called. Waits while there is none. False: this thread ends.
bool Crew::gather(std::vector<Active>& active) {
  if (!active.empty() && !has_news_) return true;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (is_ending_) return false;
    has_news_ = false;
    try {
      for (; !called_.empty(); called_.pop_back()) active.push_back({called_.back()});
    } catch (const std::bad_alloc&) {
      has_news_ = true;
      called_event_.wait_for(lock, std::chrono::milliseconds(1));
      continue;
    }
    if (!active.empty()) return true;
    rest_ = Rest::idle;
    called_event_.wait(lock);
    rest_ = Rest::none;
  }
}

// A turn for each. Returns how to wait for the next pass.
Crewed::Turn Crew::pass(std::vector<Active>& active, bool is_rested) {
  using Turn = Crewed::Turn;
  Turn next = Turn::sleep;
  const uint64_t now_us = active.size() == 1 ? 0 : clock_us();
  for (size_t i = 0; i < active.size();) {
    Active& it = active[i];
    if (!is_rested && it.rests_until_us > now_us && !it.seat->is_called && active.size() > 1) {
      ++i;
      continue;
    }
    it.seat->is_called = false;
    Turn turn = Turn::off;
    {
      const Inside inside(*this, *it.seat);
      if (inside) turn = it.seat->hand.take_turn(it.is_first);
    }
    it.is_first = false;
    it.rests_until_us = turn == Turn::sleep ? clock_us() + REST_US : 0;
    if (turn == Turn::off && drop(*it.seat)) {
      active.erase(active.begin() + static_cast<std::ptrdiff_t>(i));
      continue;
    }
    if (turn == Turn::off) it.is_first = true;
    next = std::min(next, turn);
    ++i;
  }
  return active.empty() ? Turn::off : next;
}

// False: it was called in the meantime.
bool Crew::drop(Seat& seat) {
  const std::lock_guard lock(mutex_);
  if (seat.is_called && !seat.has_left) return false;
  seat.is_called = seat.is_listed = false;
  return true;
}

void Crew::rest(std::vector<Active>& active, std::vector<pollfd>& fds) {
  const uint64_t now_us = clock_us();
  uint64_t until_us = UINT64_MAX;
  size_t announced = 0;
  bool may_sleep = true;
  try {
    fds.clear();
    fds.push_back({event_.fd, POLLIN, 0});
  } catch (const std::bad_alloc&) {
    return;
  }
  Seat& first = *active.front().seat;
  first.is_inside = true;
  const bool is_alone = active.size() == 1 && !first.has_left && first.hand.sleeps_by_itself();
  for (const Active& it : active) {
    Seat& seat = *it.seat;
    seat.is_inside = true;
    const uint64_t end_us = seat.has_left ? 0 : seat.hand.prepare_sleep(is_alone ? nullptr : &fds, now_us);
    may_sleep = end_us != 0;
    if (!may_sleep) {
      step_out(seat);
      break;
    }
    until_us = std::min(until_us, end_us);
    ++announced;
  }
  if (may_sleep) {
    const std::lock_guard lock(mutex_);
    may_sleep = !has_news_;
    if (may_sleep) {
      rest_ = is_alone ? Rest::alone : Rest::poll;
      sleeper_ = is_alone ? &active.front().seat->hand : nullptr;
    }
  }
  const uint64_t timeout_us = until_us > now_us ? until_us - now_us : 0;
  if (may_sleep) {
    if (is_alone) {
      sleeper_->sleep_by_itself(timeout_us);
    } else {
      const timespec timeout{static_cast<time_t>(timeout_us / 1'000'000),
                             static_cast<long>(timeout_us % 1'000'000 * 1'000)};
      ppoll(fds.data(), fds.size(), &timeout, nullptr);
      if (fds.front().revents != 0) event_.silence();
    }
    const std::lock_guard lock(mutex_);
    rest_ = Rest::none;
  }
  for (size_t i = 0; i < announced; ++i) {
    active[i].seat->hand.end_sleep(fds);
    step_out(*active[i].seat);
  }
}

}  // namespace sennit
