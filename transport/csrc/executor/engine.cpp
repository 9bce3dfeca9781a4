// SPDX-License-Identifier: Apache-2.0
#include "executor/engine.hpp"

#include <cxxabi.h>
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "messages/signature.hpp"
#include "trace/tracepoints.hpp"

namespace sennit {
namespace {

// A worker with its own core looks for more work this long: steps of one operation follow each other faster than a
// thread wakes.
constexpr uint64_t TEAM_SPIN_US = 100;
// So many rounds take all that a peer left when it ended the group.
constexpr int LAST_ROUNDS = 1'000;

uint32_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? static_cast<uint32_t>(CPU_COUNT(&set)) : 1u;
}

}  // namespace

Engine::Engine(const EngineConfig& config)
    : OperationHost(config.rank, config.world, config.threads,
                    uint64_t{config.ranks_here} * config.threads <= usable_cores() ? TEAM_SPIN_US : 0),
      forks_(fork_count()),
      config_(config),
      counter_page_(config.rank, config.world),
      counted_(&counter_page_),
      ports_(config.rank, config.world, config.peer_timeout_us, counter_page_, mailbox_),
      diagnosis_(config.rank, config.world, config.peer_timeout_us, mailbox_),
      backoff_(BackoffPolicy::choose(config.ranks_here, usable_cores())) {
  if (config.rank >= config.world)
    throw std::invalid_argument("rank " + std::to_string(config.rank) + " in a world of " +
                                std::to_string(config.world) + "; allowed: a rank below the world");
}

// The crew holds a reference while the engine has a seat in it.
Engine::~Engine() { leave_threads(); }

void Engine::release() {
  // This would end the parent's group, because devices and peers know these handles as the parent's.
  if (is_inherited()) return;
  if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

void Engine::connect(const std::vector<Route>& routes) {
  ports_.connect(routes);
  if (ports_.has_network()) {
    Lock lock = enter();
    join_crew();
  }
  if (!ports_.empty()) {
    std::shared_ptr<Answering> answering = of_process<Answering>();
    answer_ = answering->join([this] { return answer(); });
    answering_ = std::move(answering);
  }
}

void Engine::register_memory(const void* data, uint64_t size_bytes) {
  Lock lock = enter();
  ports_.borrow(data, size_bytes);
}

void Engine::unregister_memory(const void* data, uint64_t size_bytes) {
  Lock lock = enter();
  ports_.give_back(data, size_bytes);
}

Engine::Lock Engine::enter() {
  entering_.fetch_add(1, std::memory_order_relaxed);
  Lock lock(mutex_);
  entering_.fetch_sub(1, std::memory_order_relaxed);
  return lock;
}

sennit_status Engine::post(Plan& plan, const OperationMemory& memory, const sennit_post_options& options,
                           Operation** out, std::string& error) {
  if (plan.world != config_.world || plan.rank != config_.rank) {
    error = "the plan is for rank " + std::to_string(plan.rank) + " of " + std::to_string(plan.world) +
            ", but this is rank " + std::to_string(config_.rank) + " of " + std::to_string(config_.world);
    return SENNIT_ARGUMENT;
  }
  for (uint32_t peer = 0; plan.has_round_trips && peer < plan.world; ++peer) {
    if (peer == config_.rank || mailbox_.lane(peer)->has_round_trips()) continue;
    error = "the plan makes round trips, but rank " + std::to_string(peer) + " is not reached over shared memory";
    return SENNIT_ARGUMENT;
  }
  if (plan.has_aggregator && ports_.aggregator() == nullptr) {
    error = "the plan asks an aggregator, but the group has none";
    return SENNIT_ARGUMENT;
  }
  std::shared_ptr<const RunSizes> sizes;
  try {
    sizes = Operation::check(plan, memory, options);
  } catch (const PlanError& wrong) {
    error = wrong.what();
    return SENNIT_ARGUMENT;
  }
  Lock lock = enter();
  hear_last_words(lock);
  if (end_.status != SENNIT_OK) {
    error = end_.reason;
    return end_.status;
  }
  // What can fail comes first. After `active_.push_back` the operation runs, and an exception ends the group.
  const bool is_p2p = (options.flags & SENNIT_POST_P2P) != 0;
  const Caller caller = is_p2p ? Caller{} : caller_here();
  if (!is_p2p && !(error = refusal_here()).empty()) return SENNIT_ARGUMENT;
  if ((options.flags & SENNIT_POST_ASYNC) != 0) join_crew();
  if (plan.on_device) join_callbacks();
  // A plain reserve of one more would copy the list each time.
  if (active_.size() == active_.capacity()) active_.reserve(2 * active_.size() + 8);
  lively_.reserve(active_.capacity());
  auto* const operation = new Operation(*this, plan, memory, options, 0, std::move(sizes));
  try {
    ports_.borrow_all(*operation);
  } catch (...) {
    operation->release();
    throw;
  }
  const uint64_t now_us = clock_us();
  operation->timeout_us_ = options.timeout_us != 0 ? options.timeout_us : config_.timeout_us;
  operation->deadline_us_ = now_us + operation->timeout_us_;
  next_deadline_us_ = std::min(next_deadline_us_, operation->deadline_us_);
  ++counted_->operations_posted;
  operation->retain();  // the engine's reference, until the operation ends
  operation->post_ = posts_++;
  operation->place_ = active_.size();
  active_.push_back(operation);
  if (operation->background_) ++background_operations_;
  operation->is_of_callback_ = Callbacks::operation_here() != nullptr;
  if (is_p2p) {
    start(*operation, now_us);
  } else if (caller.is_next(order_)) {
    number(*operation, now_us);
  } else {
    order_.insert(operation->place_of_post_, caller.place);
  }
  if (sleeping_ != Sleep::awake) wake();
  if (background_operations_ != 0 && !driving_) call_crew();
  let_go(lock);
  *out = operation;
  return SENNIT_OK;
}

// A peer has ended the group. What it sent before is for operations that were posted before, and not for later ones.
void Engine::hear_last_words(Lock& lock) {
  if (std::none_of(ports_.begin(), ports_.end(), [](const Port* port) { return port->has_last_word(); })) return;
  for (int rounds = 0; rounds < LAST_ROUNDS && end_.status == SENNIT_OK; ++rounds) round(clock_us());
  let_go(lock);
}

bool Engine::launch(Operation& operation, uint64_t now_us) {
  if (operation.is_collective()) mailbox_.meet(config_.rank, operation.sequence(), operation.signature());
  if (mailbox_.failure() != nullptr) {
    check_failures(now_us);
    return true;
  }
  bool moved = false;
  const bool keeps_order = operation.on_device() || (operation.has_loans() && !held_.empty());
  if (operation.is_collective() && keeps_order) {
    held_.push_back(&operation);
    moved = begin_held();
  } else {
    if (operation.sends_alone() && (operation.on_device() || !unsent_.empty())) unsent_.push_back(&operation);
    moved = begin(operation);
  }
  if (operation.finished_steps() || (operation.background_ && !driving_)) moved |= look_at_everything(now_us);
  if (mailbox_.failure() != nullptr) check_failures(now_us);
  return moved;
}

bool Engine::begin(Operation& operation) {
  if (operation.on_device()) {
    operation.take_scratch();
    try {
      ports_.borrow_all(operation);
    } catch (...) {
      operation.drop_scratch();
      throw;
    }
  }
  operation.start();
  return operation.run_ready(false);
}

bool Engine::on_done(Operation& operation, Operation::Callback callback, bool in_order) {
  Callbacks::stand_aside();
  {
    Lock lock = enter();
    const bool is_in_order = in_order && operation.is_collective();
    const Caller caller = is_in_order ? caller_here() : Caller{};
    if (operation.status() == SENNIT_PENDING || !caller.is_next(order_)) {
      operation.set_callback(callback);
      callbacks_->ask(operation);
      if (caller.is_ordered) {
        // The order has a reference: the engine's, if the operation is pending.
        if (operation.status() != SENNIT_PENDING) operation.retain();
        operation.is_called_in_order_ = true;
        if (caller.place != nullptr) pull_forward(operation, *caller.place);
        order_.insert(operation.place_of_callbacks_, caller.place);
        let_go(lock);
      } else if (is_in_order && !keeps_order_) {
        operation.passed_at_ = sequence_.load(std::memory_order_relaxed);
      }
      // The caller may never wait, so the crew drives the operation.
      if (operation.status() == SENNIT_PENDING && !operation.background_) {
        operation.background_ = true;
        ++background_operations_;
      }
      try {
        join_callbacks();
        join_crew();
      } catch (const std::exception&) {
        return false;
      }
      if (!driving_) call_crew();
      return true;
    }
  }
  if (!call(callback)) {
    Lock lock = enter();
    ++counted_->callbacks_failed;
  }
  return true;
}

void Engine::set_timeout(uint64_t timeout_us) {
  Lock lock = enter();
  config_.timeout_us = timeout_us;
}

CounterList Engine::counters() {
  Lock lock = enter();
  return ports_.counters();
}

std::string Engine::describe() {
  Lock lock = enter();
  std::string text = "rank " + std::to_string(config_.rank) + " of " + std::to_string(config_.world) + ", operation " +
                     std::to_string(sequence()) + ", " + std::to_string(active_.size()) + " in flight";
  for (const std::string& part : {ports_.describe(), mailbox_.describe_outstanding()}) {
    if (!part.empty()) text += "; " + part;
  }
  return text;
}

// Which thread drives the engine: a waiting thread, the crew or, to answer peers, the answering thread.

namespace {

// How often a sleeping driver checks for dead peers and deadlines.
constexpr uint64_t SLEEP_MAX_US = 50'000;
// A thread without an event sleeps for this time.
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

// Looks once at everything. Returns true when anything moved.
bool Engine::look_at_everything(uint64_t now_us) {
  last_round_us_.store(now_us, std::memory_order_relaxed);
  bool moved = false;
  bool failed = false;
  for (Port* port : ports_) {
    moved |= port->progress(now_us);
    failed |= !port->failure().empty();
  }
  moved |= mailbox_.progress(now_us);
  if (!unsent_.empty()) moved |= send_held();
  for (size_t i = 0; i < lively_.size(); ++i) moved |= lively_[i]->run_ready(false);
  if (!moved) {
    // The network has nothing for us, so do one piece of local work.
    for (Operation* operation : lively_) {
      if (!operation->has_copies()) continue;
      moved = operation->run_ready(true);
      break;
    }
  }
  const bool has_ended = settle_lively();
  moved |= begin_held();
  // An operation may have sent its last message and ended, and its waiter leaves. Perhaps no round follows for long.
  if (moved || has_ended) {
    const uint64_t end_us = has_ended ? clock_us() : now_us;
    for (Port* port : ports_) port->tell_peers(has_ended, end_us);
  }
  if (failed || mailbox_.failure() != nullptr || now_us >= next_deadline_us_) check_failures(now_us);
  moved |= look_at_callbacks(now_us);
  // Operations that just failed count as movement: their waiters must know before anybody sleeps.
  return moved || first_settled_ != nullptr;
}

// Ends operations whose steps are done. Of the others, those with work left stay in the list.
bool Engine::settle_lively() {
  bool has_ended = false;
  size_t kept = 0;
  for (Operation* operation : lively_) {
    const bool is_done = operation->finished_steps();
    const bool may_end = is_done && operation->has_number() && !follows_others(*operation);
    if (may_end || !(is_done || operation->has_copies())) {
      operation->has_news_ = false;
    } else {
      lively_[kept++] = operation;
    }
    if (may_end) finish(operation, SENNIT_OK, {});
    has_ended |= may_end;
  }
  lively_.resize(kept);
  return has_ended;
}

void Engine::note_news(Operation& operation) {
  const auto earlier = std::find_if(lively_.rbegin(), lively_.rend(),
                                    [&](const Operation* other) { return other->post_ < operation.post_; });
  lively_.insert(earlier.base(), &operation);
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
  ShmPort* const shm = ports_.shm();
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
  ticket_ = shm != nullptr ? shm->prepare_sleep(how) : 0;
  // The sleep is announced. What a peer wrote before it saw the announcement must be found now.
  if (shm != nullptr && round(now_us)) {
    shm->cancel_sleep();
    return 0;
  }
  sleeping_ = how;
  return until_us;
}

void Engine::close_sleep(const std::vector<pollfd>& fds) {
  if (sleeping_ == Sleep::poll) {
    if (wake_event_ != nullptr && fds[wake_slot_].revents != 0) wake_event_->silence();
    if (ShmPort* const shm = ports_.shm(); shm != nullptr) {
      shm->cancel_sleep();
      shm->silence_bell();
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
    ports_.shm()->sleep(ticket_, timeout_us);
  }
  lock.lock();
  close_sleep(poll_fds_);
}

void Engine::wake() {
  if (sleeping_ == Sleep::poll) {
    if (wake_event_ != nullptr) wake_event_->ring();
  } else {
    ports_.shm()->wake();
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

// Several threads may call it. Each returns when no other thread is inside the engine.
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
  if (!ports_.has_network()) {
    ports_.shm()->beat();
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

// When a collective gets its number, and when callbacks that may post collectives begin (call_order.hpp).

namespace {

// How often a driver looks whether a callback blocks.
constexpr uint64_t LOOK_US = 50'000;

}  // namespace

Engine::Caller Engine::caller_here() const {
  if (end_.status != SENNIT_OK || !keeps_order_) return {};
  Operation* const caller = Callbacks::operation_here();
  if (caller == nullptr) return {.is_ordered = true};
  if (&caller->engine() != this || !caller->place_of_callbacks_.is_in) return {};
  return {.is_ordered = true, .place = &caller->place_of_callbacks_};
}

// Why the calling thread may not post a collective. Empty: it may.
std::string Engine::refusal_here() const {
  const Operation* const caller = Callbacks::operation_here();
  if (caller == nullptr || &caller->engine() != this || last_outside_ <= caller->passed_at_) return "";
  return "a callback of " + caller->describe() + " posts a collective, but operation " + std::to_string(last_outside_) +
         ", which the program posted after it asked for the callback, has begun, because a callback of the group had "
         "blocked for too long: ranks would number their collectives in different orders. Let callbacks block only in "
         "waits for operations, or wait for the callback's future before the next collective of the group";
}

void Engine::start(Operation& operation, uint64_t now_us) {
  trace::operation_begin(config_.rank, &operation, operation.plan().name.c_str(), operation.sizes().sent_bytes,
                         operation.sizes().received_bytes, operation.signature(), operation.sequence());
  guarded([&] { return launch(operation, now_us); });
}

void Engine::number(Operation& operation, uint64_t now_us) {
  const uint64_t sequence = sequence_.load(std::memory_order_relaxed) + 1;
  sequence_.store(sequence, std::memory_order_relaxed);
  if (!operation.is_of_callback_) last_outside_ = sequence;
  operation.number(sequence);
  start(operation, now_us);
}

// Acts on the first places. Whoever calls this calls let_go() next, because operations may have ended.
void Engine::advance_order() noexcept {
  while (first_settled_ == nullptr && order_.first() != nullptr) {
    CallOrder::Place& first = *order_.first();
    Operation& operation = *first.operation;
    if (first.is_post) {
      order_.remove(first);
      number(operation, clock_us());
      continue;
    }
    const bool may_begin = operation.status() != SENNIT_PENDING && !first.has_begun;
    const bool keeps_order = end_.status == SENNIT_OK && keeps_order_;
    if (!keeps_order) {
      order_.remove(first);
      operation.passed_at_ = sequence_.load(std::memory_order_relaxed);
    }
    if (may_begin) {
      first.has_begun = true;
      callbacks_->add(called_back_, operation);
    }
    if (keeps_order) return;
  }
}

// A callback waits for an operation behind it, or asks for its callbacks: from now on it comes before that callback,
// and so do the collectives before it. Whoever calls this calls let_go() next.
void Engine::pull_forward(Operation& operation, CallOrder::Place& caller) {
  order_.pull_forward(operation.place_of_post_, operation.place_of_callbacks_, caller);
  advance_order();
}

void Engine::callbacks_returned(Operation& operation) {
  Lock lock = enter();
  if (!operation.place_of_callbacks_.is_in) return;
  order_.remove(operation.place_of_callbacks_);
  advance_order();
  if (sleeping_ != Sleep::awake) wake();
  if (background_operations_ != 0 && !driving_) call_crew();
  let_go(lock);
}

// Gives up the order if the callbacks that all others wait for block.
bool Engine::look_at_callbacks(uint64_t now_us) {
  const CallOrder::Place* const first = order_.first();
  if (first == nullptr || !first->has_begun || first->next == nullptr || now_us < looked_us_ + LOOK_US) return false;
  // If this process stood still, so did the callbacks.
  const uint64_t passed_us = std::min(now_us - std::exchange(looked_us_, now_us), 2 * LOOK_US);
  const uint64_t sequence = first->operation->sequence();
  const bool is_new = std::exchange(looked_at_, sequence) != sequence;
  blocked_us_ = is_new || callbacks_->is_waiting(*first->operation) ? 0 : blocked_us_ + passed_us;
  if (blocked_us_ < config_.blocked_us) return false;
  keeps_order_ = false;
  advance_order();
  return true;
}

// Operations on device memory: when they begin, when they send messages, and what follows when a copy ends.

namespace {

// Each operation holds its own scratch. With this many, one can copy while another uses the network.
constexpr uint32_t DEVICE_COLLECTIVES_AT_ONCE = 4;

}  // namespace

// Operations begin in the group's order, which is the same on all ranks. So the oldest operation runs everywhere and
// can end. A collective with loans on host memory keeps the order too: lanes grant loans in the order in which they are
// asked for, and a younger operation with all loans of a lane would hold up an older one.
bool Engine::begin_held() {
  bool began = false;
  while (!held_.empty()) {
    Operation& next = *held_.front();
    if (next.on_device()) {
      if (device_collectives_running_ == DEVICE_COLLECTIVES_AT_ONCE) break;
      ++device_collectives_running_;
    }
    held_.pop_front();
    begin(next);
    began = true;
  }
  return began;
}

bool Engine::may_send(const Operation& operation) const {
  for (const Operation* earlier : unsent_) {
    if (earlier == &operation) return true;
    if (earlier->shares_order_with(operation) && !earlier->is_sent()) return false;
  }
  return true;
}

bool Engine::send_held() {
  bool sent = false;
  for (Operation* operation : unsent_) {
    if (!operation->holds_send() || !may_send(*operation)) continue;
    operation->dispatch_held_send();
    sent = true;
  }
  std::erase_if(unsent_, [](const Operation* operation) { return operation->is_sent(); });
  return sent;
}

void Engine::copy_done(Operation& operation, uint32_t step, const char* error) {
  Lock lock = enter();
  if (operation.status() != SENNIT_PENDING) return;
  guarded([&] {
    if (error != nullptr) throw DeviceError(operation.describe() + ": a copy between host and device failed: " + error);
    operation.on_copy_done(step);
    return operation.run_ready(false);
  });
  if (end_.status != SENNIT_OK) {
    let_go(lock);
    return;
  }
  // The driver does the rest.
  if (sleeping_ != Sleep::awake) wake();
  if (background_operations_ != 0 && !driving_) call_crew();
}

// How operations and groups end, and who calls back.

void Engine::check_failures(uint64_t now_us) {
  if (end_.status != SENNIT_OK) return;
  for (const Port* port : ports_) {
    if (const std::string_view failure = port->failure(); !failure.empty()) {
      end(diagnosis_.of_port(failure));
      return;
    }
  }
  if (const MailboxFailure* failure = mailbox_.failure()) {
    end(diagnosis_.of_mailbox(*failure));
    return;
  }
  next_deadline_us_ = UINT64_MAX;
  const Operation* late = nullptr;  // the first that was posted
  Suspects late_suspects;
  for (const Operation* operation : active_) {
    uint64_t until_us = operation->deadline_us_;
    if (until_us <= now_us) {
      if (late != nullptr && late->post_ < operation->post_) continue;
      const uint64_t timeout_us = operation->timeout_us_;
      Suspects suspects = diagnosis_.find_suspects(operation->posted_us(), timeout_us, now_us);
      until_us += diagnosis_.extension_us(suspects, timeout_us);
      if (until_us <= now_us) {
        late = operation;
        late_suspects = std::move(suspects);
      }
    }
    next_deadline_us_ = std::min(next_deadline_us_, until_us);
  }
  if (late != nullptr) end(diagnosis_.late(late->describe(), late->timeout_us_, obstacle_of(*late), late_suspects));
}

// Whether it is a barrier with earlier collectives in flight. As with gloo and NCCL, what a program began before a
// barrier has ended after it, and only the barrier is waited for.
bool Engine::follows_others(const Operation& operation) const {
  if (collective_of(operation.signature()) != SENNIT_BARRIER || !operation.is_collective()) return false;
  return std::any_of(active_.begin(), active_.end(), [&](const Operation* other) {
    return other->is_collective() && other->has_number() && other->sequence() < operation.sequence();
  });
}

// Whether this rank has begun what its peers may still need it for: a collective, or a message to one of them.
bool Engine::is_needed() const {
  return std::any_of(active_.begin(), active_.end(),
                     [](const Operation* one) { return one->is_collective() || one->sends_alone(); });
}

// What on this rank holds the operation up.
std::string Engine::obstacle_of(const Operation& operation) const {
  if (std::find(held_.begin(), held_.end(), &operation) != held_.end()) return "earlier operations on device memory";
  if (!operation.has_number()) return "callbacks of earlier operations of the group";
  if (operation.finished_steps() && follows_others(operation)) return "earlier operations of the group";
  const uint32_t copies = operation.copies_running();
  return copies != 0 ? std::to_string(copies) + " copies between host and device" : "";
}

void Engine::end(GroupEnd how) noexcept {
  if (end_.status != SENNIT_OK) return;
  end_ = std::move(how);
  mailbox_.abandon();
  ports_.say_farewell(end_.says_goodbye ? nullptr : &end_.notice);
  for (Port* port : ports_) port->revoke();
  // Nothing reads or writes the operations' memory any more, so their owners may have it back.
  while (!active_.empty()) finish(active_.back(), end_.status, end_.error_of(*active_.back()));
  if (sleeping_ != Sleep::awake) wake();
}

// To be called within an exception handler.
void Engine::end_in_doubt() noexcept { end(diagnosis_.in_doubt()); }

void Engine::finish(Operation* operation, sennit_status status, std::string reason) noexcept {
  active_[operation->place_] = active_.back();
  active_[operation->place_]->place_ = operation->place_;
  active_.pop_back();
  if (std::exchange(operation->has_news_, false)) std::erase(lively_, operation);
  if (operation->background_) --background_operations_;
  std::erase(unsent_, operation);
  if (const auto held = std::find(held_.begin(), held_.end(), operation); held != held_.end()) {
    held_.erase(held);
  } else if (operation->on_device() && operation->is_collective()) {
    --device_collectives_running_;
  }
  // Once the operation is settled, its owner may free the memory.
  ports_.give_back_all(*operation);
  if (operation->place_of_post_.is_in) order_.remove(operation->place_of_post_);
  if (operation->has_number()) trace::operation_end(config_.rank, operation, status, operation->sequence());
  if (status == SENNIT_OK) {
    ++counted_->operations_completed;
    counted_->operation_time_us += clock_us() - operation->posted_us();
  } else {
    ++counted_->operations_failed;
  }
  operation->settle(status, std::move(reason));
  (last_settled_ != nullptr ? last_settled_->next_settled_ : first_settled_) = operation;
  last_settled_ = operation;
}

// Wakes the waiters of operations that have ended, and lets the operations go: those with callbacks to the threads that
// call them, or to their place in the order of calls.
void Engine::let_go(Lock& lock) {
  if (first_settled_ == nullptr) return;
  Operation* without_callbacks = nullptr;
  while (first_settled_ != nullptr) {
    last_settled_ = nullptr;
    for (Operation* operation = std::exchange(first_settled_, nullptr); operation != nullptr;) {
      Operation* const next = operation->next_settled_;
      if (!operation->has_callbacks()) {
        operation->next_settled_ = std::exchange(without_callbacks, operation);
      } else if (!operation->place_of_callbacks_.is_in) {
        callbacks_->add(called_back_, *operation);
      }
      operation = next;
    }
    advance_order();
  }
  if (waiters_ != 0) role_free_.notify_all();
  // The end of an operation frees memory, and perhaps releases the engine.
  lock.unlock();
  while (without_callbacks != nullptr) {
    std::exchange(without_callbacks, without_callbacks->next_settled_)->release();
  }
  lock.lock();
}

void Engine::run_callbacks(Operation& operation) {
  // Its destructor runs also when a callback ends this thread.
  struct Returned {
    ~Returned() {
      if (operation.is_called_in_order_) operation.engine().callbacks_returned(operation);
    }
    Operation& operation;
  } const returned{operation};
  uint64_t failed = 0;
  for (const Operation::Callback callback : {operation.take_device_callback(), operation.take_callback()})
    if (callback.function != nullptr && !call(callback)) ++failed;
  if (failed == 0) return;
  Lock lock = enter();
  counted_->callbacks_failed += failed;
}

// Returns false if the callback threw. The exception stops here, because a callback has no caller to catch it.
bool Engine::call(Operation::Callback callback) {
  try {
    callback.function(callback.argument);
    return true;
  } catch (const abi::__forced_unwind&) {
    throw;  // the end of this thread, which must not be caught
  } catch (...) {
    return false;
  }
}

void Engine::abort(std::string_view reason) {
  Lock lock = enter();
  end(diagnosis_.aborted(reason));
  let_go(lock);
}

void Engine::shutdown(uint64_t timeout_us) {
  Callbacks::stand_aside();
  {
    Lock lock = enter();
    const uint64_t give_up_us = clock_us() + timeout_us;
    const auto is_busy = [this] { return !mailbox_.idle() || !ports_.idle() || is_needed(); };
    {
      backoff_.reset();
      const Waiting waiting(*this);  // asks a background driver for the role
      while (end_.status == SENNIT_OK && (is_busy() || driving_) && clock_us() < give_up_us) {
        if (driving_) {
          if (sleeping_ != Sleep::awake) wake();
          role_free_.wait_for(lock, std::chrono::milliseconds(1));
          continue;
        }
        const Driving driving(*this);
        drive_once(lock);
      }
    }
    end(diagnosis_.shut_down());
    stopping_ = true;
    if (sleeping_ != Sleep::awake) wake();
    let_go(lock);
  }
  callbacks_->wait(called_back_, timeout_us);
  leave_threads();
}

std::string Engine::failure() {
  Lock lock = enter();
  return end_.reason;
}

std::vector<uint32_t> Engine::lost_ranks() {
  Lock lock = enter();
  return end_.notice.lost;
}

std::vector<uint32_t> Engine::find_gone_ranks() {
  Lock lock = enter();
  return ports_.find_gone(clock_us());
}

}  // namespace sennit
