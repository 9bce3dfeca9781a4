// SPDX-License-Identifier: Apache-2.0
// The engine of one communicator: ports, mailbox and the operations in flight, driven by whichever thread waits.
//
// One thread at a time is the driver: it runs rounds (ports, mailbox, ready steps) under the lock and gives the lock
// away between rounds. A thread in wait() becomes the driver if there is none. Operations that nobody waits for are
// driven by the crew (crew.hpp), and while no thread drives, the answering thread answers the peers (answering.hpp).
// None of them runs user code: callbacks of operations have threads of their own (callbacks.hpp). All groups of a
// process share these threads.
//
// A group ends once, by end(), after a shutdown, an abort or a failure. end() first tells the peers. Then ports and
// devices give up all user memory. Only then do the operations in flight end, so that their owners may free the memory.
// An exception while the group's state changes (above all: out of memory) leaves that state in doubt, so it ends the
// group too. It is not thrown further.
#pragma once

#include <poll.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "executor/answering.hpp"
#include "executor/backoff.hpp"
#include "executor/call_order.hpp"
#include "executor/callbacks.hpp"
#include "executor/clock.hpp"
#include "executor/crew.hpp"
#include "executor/diagnosis.hpp"
#include "executor/group_ports.hpp"
#include "executor/operation.hpp"
#include "ports/of_process.hpp"
#include "telemetry/counter_page.hpp"

namespace sennit {

struct EngineConfig {
  uint32_t rank;
  uint32_t world;
  uint64_t timeout_us;  // default deadline of an operation
  uint64_t seed;
  uint32_t ranks_here;  // ranks that share this machine's cores, this one included
  uint64_t peer_timeout_us = flow::FlowConfig{}.peer_timeout_us;
  uint32_t threads = 1;  // that share folds and copies, the driver included
  // How long a callback may keep later calls waiting while it waits for no operation. One that computes is much faster.
  // One that waits for what its own rank does later would block for ever. A fifth, if somebody waits for such a call.
  uint64_t blocked_us = 5'000'000;
};

struct EngineCounters {
  uint64_t operations_posted = 0, operations_completed = 0, operations_failed = 0;
  uint64_t operation_time_us = 0;  // completed operations: from post to end
  uint64_t callbacks_failed = 0;   // callbacks that threw

  static constexpr const char* GROUP = "engine";
  static std::vector<std::string> names() {
    return {"operations_posted", "operations_completed", "operations_failed", "operation_time_us", "callbacks_failed"};
  }
};

// The error in a child of fork that uses its parent's group.
inline constexpr const char* INHERITED =
    "this process was forked after the group was made; its connections belong to the parent. Start processes with "
    "spawn or forkserver, or make the group after the fork";

class Engine final : public OperationHost, private Crewed {
 public:
  explicit Engine(const EngineConfig& config);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Set-up, before connect().
  GroupPorts& ports() { return ports_; }
  // Connects the ports. Operations may follow. Throws on failure.
  void connect(const std::vector<Route>& routes);

  // Declares memory that stays in place until unregister_memory. A device need not register it for each operation.
  void register_memory(const void* data, uint64_t size_bytes);
  void unregister_memory(const void* data, uint64_t size_bytes);

  sennit_status post(Plan& plan, const OperationMemory& memory, const sennit_post_options& options, Operation** out,
                     std::string& error);
  // A device's copy has ended. `error` is null if it succeeded.
  void copy_done(Operation& operation, uint32_t step, const char* error);
  // False while a device still copies the earlier send. The lock is held.
  bool may_send(const Operation& operation) const override;
  void foresee(const MessageHeader& header, bool is_send) override { ports_.aggregator()->foresee(header, is_send); }
  void note_news(Operation& operation) override;
  sennit_status wait(Operation& operation, uint64_t timeout_us);
  // False: a thread that drives the operation, or one that calls back, could not be started. The callback is set
  // nevertheless. `in_order`: the callback of a collective gets a place in the order of calls (call_order.hpp).
  bool on_done(Operation& operation, Operation::Callback callback, bool in_order = false);
  // Calls the callbacks of an operation that has ended. The calling thread holds no role and no lock.
  void run_callbacks(Operation& operation);
  void set_timeout(uint64_t timeout_us);  // the default deadline of later operations
  void abort(std::string_view reason);
  // Why the group ended. Empty while it works.
  std::string failure();
  // The ranks that the failure blames: dead, or without a sign of life until a deadline. Empty if it blames none.
  std::vector<uint32_t> lost_ranks();
  // Looks up the peers whose process, or whose end of this group, is gone now. This is proof; lost_ranks() may be
  // suspicion.
  std::vector<uint32_t> find_gone_ranks();
  void shutdown(uint64_t timeout_us);

  uint32_t rank() const { return config_.rank; }
  uint32_t world() const { return config_.world; }
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }
  CounterList counters();
  std::string describe();
  // The file in which other processes read the counters. Empty without a file.
  const std::string& counter_page() const { return counter_page_.path(); }

  // Whether this process was forked from the one that made the engine. Sockets, queues and threads belong to the
  // parent, and one of its threads may have held the lock. So a child may call only this function, rank() and world().
  bool is_inherited() const { return forks_ != fork_count(); }

  // An owner calls shutdown before its last release, because the crew keeps the engine alive.
  void retain() override { references_.fetch_add(1, std::memory_order_relaxed); }
  void release() override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  // A thread that waits in the engine. The crew leaves the driver's role to it.
  class Waiting {
   public:
    explicit Waiting(Engine& engine) : engine_(engine) { ++engine_.waiters_; }
    Waiting(const Waiting&) = delete;
    ~Waiting() {
      --engine_.waiters_;
      if (engine_.waiters_ != 0) engine_.role_free_.notify_all();
      if (engine_.background_operations_ != 0 && engine_.waiters_ == 0 && !engine_.driving_) engine_.call_crew();
    }

   private:
    Engine& engine_;
  };

  // The driver's role. The lock is held at its begin and at its end.
  class Driving {
   public:
    explicit Driving(Engine& engine) : engine_(engine) { engine_.driving_ = true; }
    Driving(const Driving&) = delete;
    ~Driving() {
      engine_.driving_ = false;
      if (engine_.waiters_ != 0) engine_.role_free_.notify_all();
    }

   private:
    Engine& engine_;
  };

  ~Engine();
  Lock enter();  // takes the lock ahead of a driver that would take it again at once
  // Sockets can only be polled. A group within one host sleeps on a futex, which is cheaper.
  bool sleeps_in_poll() const { return ports_.has_network() || ports_.shm() == nullptr; }
  // Runs work on the group's state. Returns the result. An exception ends the group; then the result is true.
  template <class Work>
  bool guarded(Work work) noexcept {
    try {
      return work();
    } catch (...) {
      end_in_doubt();
      return true;
    }
  }
  bool round(uint64_t now_us) noexcept {
    return guarded([&] { return look_at_everything(now_us); });
  }
  bool look_at_everything(uint64_t now_us);
  bool settle_lively();
  // Where the calling thread's posts and callbacks come in the order of calls.
  struct Caller {
    bool is_ordered = false;            // false: they wait for nothing
    CallOrder::Place* place = nullptr;  // before it, or at the end
    bool is_next(const CallOrder& order) const { return !is_ordered || order.first() == place; }
  };
  Caller caller_here() const;
  std::string refusal_here() const;
  void start(Operation& operation, uint64_t now_us);
  void number(Operation& operation, uint64_t now_us);
  void advance_order() noexcept;
  void pull_forward(Operation& operation, CallOrder::Place& caller);
  void callbacks_returned(Operation& operation);
  bool look_at_callbacks(uint64_t now_us);
  void hear_last_words(Lock& lock);
  bool launch(Operation& operation, uint64_t now_us);
  bool begin(Operation& operation);
  bool begin_held();
  bool send_held();
  // Returns the time when the round began.
  uint64_t drive_once(Lock& lock);
  void sleep(Lock& lock, uint64_t now_us);
  uint64_t announce_sleep(std::vector<pollfd>* fds, uint64_t now_us);
  void close_sleep(const std::vector<pollfd>& fds);
  void wake();
  void finish(Operation* operation, sennit_status status, std::string reason) noexcept;
  void let_go(Lock& lock);
  bool call(Operation::Callback callback);
  void check_failures(uint64_t now_us);
  bool follows_others(const Operation& operation) const;
  bool is_needed() const;
  std::string obstacle_of(const Operation& operation) const;
  void end(GroupEnd how) noexcept;
  void end_in_doubt() noexcept;
  uint64_t answer();
  // Starts the crew's thread if this is its first engine. Throws std::system_error.
  void join_crew();
  // Starts the threads that call back if this is their first engine.
  void join_callbacks();
  void call_crew() noexcept;
  void leave_threads();

  Turn take_turn(bool is_first) override;
  bool sleeps_by_itself() const override { return !sleeps_in_poll(); }
  uint64_t prepare_sleep(std::vector<pollfd>* fds, uint64_t now_us) override;
  void sleep_by_itself(uint64_t timeout_us) override { ports_.shm()->sleep(ticket_, timeout_us); }
  void end_sleep(const std::vector<pollfd>& fds) override;
  void interrupt() override { ports_.shm()->wake(); }
  void relieved() override { release(); }

  const uint64_t forks_;
  EngineConfig config_;
  CounterPage counter_page_;  // constructed before the ports, which count in it
  const Counted<EngineCounters> counted_;
  GroupPorts ports_;
  const Diagnosis diagnosis_;
  Backoff backoff_;

  std::mutex mutex_;
  std::atomic<uint32_t> entering_{0};
  std::condition_variable role_free_;  // signals that the driver's role is free, or that an operation ended
  bool driving_ = false;
  Sleep sleeping_ = Sleep::awake;
  uint32_t ticket_ = 0;                    // of the sleep in shared memory
  const WakeEvent* wake_event_ = nullptr;  // of the thread that sleeps in poll; null: it has none
  size_t wake_slot_ = 0;                   // of it among the descriptors of the sleep
  uint32_t waiters_ = 0;
  uint32_t background_operations_ = 0;
  std::vector<Operation*> active_;  // in no order: each knows its place
  // Those with steps that can run, or that are done: a round looks at no others. In order of the posts.
  std::vector<Operation*> lively_;
  uint64_t posts_ = 0;
  std::deque<Operation*> held_;  // collectives that are active but not begun, in the group's order
  uint32_t device_collectives_running_ = 0;
  std::vector<Operation*> unsent_;  // point-to-point sends from a device, and sends behind them, in order of the calls
  CallOrder order_;
  bool keeps_order_ = true;    // false: a callback has blocked for too long
  uint64_t last_outside_ = 0;  // the last number of a collective that no callback posted
  uint64_t looked_us_ = 0;     // when look_at_callbacks() last looked,
  uint64_t looked_at_ = 0;     // at the callbacks of which operation,
  uint64_t blocked_us_ = 0;    // and how long they have blocked
  // Settled operations that let_go() has not seen. A linked list, so that ending an operation allocates nothing.
  Operation* first_settled_ = nullptr;
  Operation* last_settled_ = nullptr;
  std::vector<pollfd> poll_fds_;  // used by the driver's last sleep
  std::atomic<uint64_t> sequence_{0};
  uint64_t next_deadline_us_ = UINT64_MAX;
  GroupEnd end_{SENNIT_OK, {}};  // status SENNIT_OK: the group works
  bool stopping_ = false;
  std::shared_ptr<Crew> crew_;
  std::shared_ptr<Crew::Seat> seat_;
  const std::shared_ptr<Callbacks> callbacks_ = of_process<Callbacks>();
  Callbacks::Member called_back_;
  std::atomic<uint32_t> references_{1};
  std::atomic<uint64_t> last_round_us_{0};
  uint64_t idle_answers_ = 0;  // used by the answering thread only
  std::shared_ptr<Answering> answering_;
  std::shared_ptr<Answering::Member> answer_;
};

}  // namespace sennit
