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

// The seat whose turn this thread is in.
thread_local const void* turn_of = nullptr;

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

// This thread inside a hand. Also ends when a callback ends the thread, as Python does at the end of a process.
class Crew::Inside {
 public:
  Inside(Crew& crew, Seat& seat) : crew_(crew), seat_(seat), is_in_(!seat.is_inside.exchange(true)) {}
  ~Inside() {
    if (!is_in_) return;
    const bool is_owed = seat_.is_owed;
    crew_.step_out(seat_);
    if (is_owed) seat_.hand.relieved();
  }
  Inside(const Inside&) = delete;
  // False: it has left, or a thread whose place this one took is still inside.
  explicit operator bool() const { return is_in_ && !seat_.has_left; }

 private:
  Crew& crew_;
  Seat& seat_;
  const bool is_in_;
};

std::shared_ptr<Crew::Seat> Crew::join(Crewed& hand) {
  auto seat = std::make_shared<Seat>(hand);
  std::unique_lock lock(mutex_);
  called_.reserve(members_.size() + 1);
  members_.reserve(members_.size() + 1);
  if (shift_in_charge_ == nullptr) start();
  members_.push_back(seat);
  if (watch_) return seat;
  try {
    answering_ = of_process<Answering>();
    watch_ = answering_->join([this] { return watch(); });
  } catch (...) {
    lock.unlock();
    leave(seat);
    throw;
  }
  return seat;
}

void Crew::step_out(Seat& seat) noexcept {
  seat.is_inside = false;
  if (!seat.has_left) return;
  const std::lock_guard lock(mutex_);
  left_event_.notify_all();
}

// The lock is held.
void Crew::start() {
  auto shift = std::make_shared<Shift>();
  auto thread = std::thread([self = shared_from_this(), shift] { self->work(shift.get()); });
  if (thread_.joinable()) thread_.detach();  // the stuck one
  thread_ = std::move(thread);
  shift_ = std::move(shift);
  shift_in_charge_ = shift_.get();
  watched_turns_ = 0;
  // It drives all that the one before drove.
  called_.clear();
  for (const auto& seat : members_) list(seat);
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
  if (leave(seat)) seat->hand.relieved();
}

// Returns whether relieved() is due now.
bool Crew::leave(const std::shared_ptr<Seat>& seat) {
  const bool is_in_turn = turn_of == seat.get();
  std::unique_lock lock(mutex_);
  const bool is_first = !seat->has_left.exchange(true);
  if (is_first) {
    if (is_in_turn) seat->is_owed = true;
    std::erase(members_, seat);
    end_rest();
  }
  if (!is_in_turn) left_event_.wait(lock, [&] { return !seat->is_inside; });
  std::thread ending;
  std::shared_ptr<Answering::Member> watch;
  std::shared_ptr<Answering> answering;
  if (is_first && members_.empty()) {
    shift_in_charge_ = nullptr;
    ending = std::move(thread_);
    watch = std::move(watch_);
    answering = std::move(answering_);
    end_rest();
  }
  lock.unlock();
  if (watch) answering->leave(watch);
  if (ending.get_id() == std::this_thread::get_id()) {
    ending.detach();
  } else if (ending.joinable()) {
    ending.join();
  }
  return is_first && !is_in_turn;
}

// On the answering thread.
uint64_t Crew::watch() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || members_.empty()) return WATCH_US;
  const uint64_t now_us = clock_us();
  const uint64_t turns = shift_->turns.load(std::memory_order_relaxed);
  const bool is_dead = shift_in_charge_ == nullptr;
  if (!is_dead && (turns != watched_turns_ || turns % 2 == 0 || members_.size() == 1)) {
    watched_turns_ = turns;
    watched_since_us_ = now_us;
    return WATCH_US;
  }
  if (!is_dead && now_us - watched_since_us_ < WATCH_US / 2) return WATCH_US;
  try {
    start();
  } catch (const std::exception&) {  // the next look tries again
  }
  return WATCH_US;
}

void Crew::work(Shift* shift) {
  begin_own_thread("sennit-crew");
  // A callback may end this thread.
  struct Charge {
    ~Charge() {
      const std::lock_guard lock(crew.mutex_);
      if (crew.shift_in_charge_ == shift) crew.shift_in_charge_ = nullptr;
    }
    Crew& crew;
    Shift* const shift;
  } const charge{*this, shift};
  std::vector<Active> active;
  std::vector<pollfd> fds;
  bool is_rested = true;
  while (gather(active, shift)) {
    const Crewed::Turn next = pass(active, shift, is_rested);
    is_rested = false;
    if (is_over(shift)) return;
    switch (next) {
      case Crewed::Turn::spin:
        relax();
        break;
      case Crewed::Turn::yield:
        sched_yield();
        break;
      case Crewed::Turn::sleep:
        rest(active, fds, shift);
        is_rested = true;
        break;
      case Crewed::Turn::off:
      case Crewed::Turn::moved:
        break;
    }
  }
}

// Takes over the seats that called. Waits while there is none. False: the shift is over.
bool Crew::gather(std::vector<Active>& active, const Shift* shift) {
  if (!active.empty() && !has_news_) return !is_over(shift);
  std::unique_lock lock(mutex_);
  for (;;) {
    if (is_over(shift)) return false;
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
Crewed::Turn Crew::pass(std::vector<Active>& active, Shift* shift, bool is_rested) {
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
      struct Counted {
        explicit Counted(Shift& of, const Seat& seat) : shift(of) {
          turn_of = &seat;
          count();
        }
        ~Counted() {
          count();
          turn_of = nullptr;
        }
        void count() { shift.turns.store(shift.turns.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
        Shift& shift;
      };
      const Inside inside(*this, *it.seat);
      const Counted counted(*shift, *it.seat);
      if (inside) turn = it.seat->hand.take_turn(it.is_first);
    }
    if (is_over(shift)) {
      // The thread that took this one's place passed the seat over.
      const std::lock_guard lock(mutex_);
      it.seat->is_called = true;
      if (!it.seat->has_left && !it.seat->is_listed) list(it.seat);
      end_rest();
      return Turn::off;
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
  if (seat.is_called && !seat.has_left && !seat.is_inside) return false;
  seat.is_called = seat.is_listed = false;
  return true;
}

void Crew::rest(std::vector<Active>& active, std::vector<pollfd>& fds, const Shift* shift) {
  const bool is_alone = active.size() == 1 && active.front().seat->hand.sleeps_by_itself();
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
  for (const Active& it : active) {
    Seat& seat = *it.seat;
    const bool is_in = !seat.is_inside.exchange(true);
    const uint64_t end_us = is_in && !seat.has_left ? seat.hand.prepare_sleep(is_alone ? nullptr : &fds, now_us) : 0;
    may_sleep = end_us != 0;
    if (!may_sleep) {
      if (is_in) step_out(seat);
      break;
    }
    until_us = std::min(until_us, end_us);
    ++announced;
  }
  if (may_sleep) {
    const std::lock_guard lock(mutex_);
    may_sleep = !has_news_ && !is_over(shift);
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
