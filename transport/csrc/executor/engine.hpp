// SPDX-License-Identifier: Apache-2.0
// The engine of one communicator: ports, mailbox and the operations in flight, driven by whichever thread waits.
//
// One thread at a time is the driver: it runs rounds (ports, mailbox, ready steps) under the lock and gives the lock
// away between rounds. A thread in wait() becomes the driver if there is none; the background thread drives operations
// that nobody waits for. While no thread drives, the answering thread answers the peers.
//
// A group ends once, by end(), whether it was shut down, aborted or failed: the peers are told, then ports and devices
// give up all user memory, and only then do the operations in flight end, so that their owners may free it. An
// exception in the work on the group's state (out of memory, most of all) leaves that state in doubt: it ends the group
// as well, and goes no further.
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
#include <thread>
#include <vector>

#include "executor/answering.hpp"
#include "executor/backoff.hpp"
#include "executor/operation.hpp"
#include "messages/failure.hpp"
#include "messages/mailbox.hpp"
#include "ports/shm_port.hpp"
#include "ports/udp_port.hpp"
#include "ports/verbs_port.hpp"
#include "telemetry/counter_page.hpp"

namespace sennit {

struct EngineConfig {
  uint32_t rank;
  uint32_t world;
  uint64_t timeout_us;  // default deadline of an operation
  uint64_t seed;
  uint32_t ranks_here;  // ranks that share this machine's cores, this one included
  uint64_t peer_timeout_us = flow::FlowConfig{}.peer_timeout_us;
};

struct Route {
  enum class Kind { self, shm, udp, verbs } kind;  // verbs: to a peer of either of the last two
  std::vector<std::byte> info;                     // udp, verbs: the peer's local_info
};

struct EngineCounters {
  uint64_t operations_posted = 0, operations_completed = 0, operations_failed = 0;
  uint64_t operation_time_us = 0;  // of those completed: from post to end
  uint64_t callbacks_failed = 0;   // callbacks that threw

  static constexpr const char* GROUP = "engine";
  static std::vector<std::string> names() {
    return {"operations_posted", "operations_completed", "operations_failed", "operation_time_us", "callbacks_failed"};
  }
};

// How often this process and the processes above it have forked since the first call.
uint64_t fork_count();

// What a child of fork is told that uses its parent's group.
inline constexpr const char* INHERITED =
    "this process was forked after the group was made; its connections belong to the parent. Start processes with "
    "spawn or forkserver, or make the group after the fork";

// What a thread that sleeps in poll is woken with.
struct WakeEvent {
  WakeEvent();  // throws std::system_error
  ~WakeEvent();
  WakeEvent(const WakeEvent&) = delete;
  WakeEvent& operator=(const WakeEvent&) = delete;
  const int fd;
};

class Engine {
 public:
  explicit Engine(const EngineConfig& config);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Set-up, in this order, before any operation. Throws on failure.
  std::vector<std::byte> shm_offer();
  bool shm_accept(uint32_t peer, std::span<const std::byte> offer);
  std::vector<std::byte> udp_open(const UdpConfig& config);
  std::vector<std::byte> verbs_open(const VerbsConfig& config);
  // Optional, between udp_open and connect: packets over every path to the peers of udp routes (ports/trial.hpp).
  void begin_trial(const std::vector<Route>& routes);
  // Until there is nothing more to find out, or for `limit_us`; true in the former case.
  bool try_network(uint64_t limit_us);
  // In place of connect: tells the peers that could be reached why there will be no group.
  void give_up(const std::string& reason);
  UdpPort* udp() { return udp_.get(); }
  void connect(const std::vector<Route>& routes);

  // Memory that stays where it is until unregister_memory: a device need not register it for each operation.
  void register_memory(const void* data, uint64_t size_bytes);
  void unregister_memory(const void* data, uint64_t size_bytes);

  sennit_status post(Plan& plan, const OperationMemory& memory, const sennit_post_options& options, Operation** out,
                     std::string& error);
  // A device's copy has ended; `error` null: well.
  void copy_done(Operation& operation, uint32_t step, const char* error);
  // False: an earlier send of the same tag to the same peer is still being copied from a device. The lock is held.
  bool may_send(const Operation& operation) const;
  sennit_status wait(Operation& operation, uint64_t timeout_us);
  // False: no thread could be started that drives the operation while nobody waits. The callback is set all the same.
  bool on_done(Operation& operation, Operation::Callback callback);
  void set_timeout(uint64_t timeout_us);  // the default deadline of operations posted from now on
  void abort(std::string_view reason);
  // Why the group ended; empty while it works.
  std::string failure();
  // The ranks that the failure blames: dead, or without a sign of life until a deadline. Empty if it blames none.
  std::vector<uint32_t> lost_ranks();
  // Peers whose processes, or whose ends of this group, are gone, looked up now: proof, where lost_ranks() may be
  // suspicion.
  std::vector<uint32_t> find_gone_ranks();
  void shutdown(uint64_t timeout_us);

  Mailbox& mailbox() { return mailbox_; }
  uint32_t rank() const { return config_.rank; }
  uint32_t world() const { return config_.world; }
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }
  CounterList counters();
  std::string describe();
  // The file in which other processes read the counters; empty where there is none.
  const std::string& counter_page() const { return counter_page_.path(); }

  // This process was forked from the one that made the engine. Its sockets, queues and threads belong to that one, and
  // a thread of that one may have held the lock: nothing may be called here but this, rank() and world().
  bool is_inherited() const { return forks_ != fork_count(); }

  // An owner calls shutdown before its last release: the background thread keeps the engine alive.
  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  void release();

 private:
  using Lock = std::unique_lock<std::mutex>;

  // A thread that waits in here. The background thread leaves the driver's role to it.
  class Waiting {
   public:
    explicit Waiting(Engine& engine) : engine_(engine) { ++engine_.waiters_; }
    Waiting(const Waiting&) = delete;
    ~Waiting() {
      --engine_.waiters_;
      if (engine_.waiters_ != 0) engine_.role_free_.notify_all();
      if (engine_.background_operations_ != 0 && engine_.waiters_ == 0 && !engine_.driving_)
        engine_.background_work_.notify_one();
    }

   private:
    Engine& engine_;
  };

  // The driver's role. The lock is held where it begins and where it ends.
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
  bool has_network() const { return udp_ || verbs_; }
  // Runs work on the group's state. An exception ends the group. Returns what the work does; true after an exception.
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
  bool launch(Operation& operation, uint64_t now_us);
  bool begin(Operation& operation);
  bool begin_held();
  bool send_held();
  // Returns the time at which it began.
  uint64_t drive_once(Lock& lock, Backoff& backoff);
  void sleep(Lock& lock, uint64_t now_us);
  void wake();
  void borrow_memory(const Operation& operation);
  void finish(Operation* operation, sennit_status status, std::string reason) noexcept;
  void run_callbacks(Lock& lock);
  bool call(Operation::Callback callback);
  void check_failures(uint64_t now_us);
  void fail_as_told(uint32_t reporter, const FailureNotice& notice);
  void fail_late(const Operation& operation, uint64_t now_us);
  enum class Farewell : uint8_t { goodbye, notice };
  void end(sennit_status status, std::string reason, FailureNotice notice, Farewell farewell) noexcept;
  void end_in_doubt() noexcept;
  void say_farewell(const FailureNotice& notice, Farewell farewell) noexcept;
  bool is_as_good_as_lost(uint32_t peer) const;
  uint64_t answer();
  void background();
  void start_thread();
  void join_thread();

  const uint64_t forks_;
  EngineConfig config_;
  CounterPage counter_page_;  // before the ports, which count in it
  const Counted<EngineCounters> counted_;
  Mailbox mailbox_;
  std::unique_ptr<ShmPort> shm_;
  std::unique_ptr<UdpPort> udp_;
  std::unique_ptr<VerbsPort> verbs_;
  std::vector<Port*> ports_;
  BackoffPolicy policy_;

  std::mutex mutex_;
  std::atomic<uint32_t> entering_{0};
  std::condition_variable role_free_;  // the driver's role became free, or an operation ended
  std::condition_variable background_work_;
  bool driving_ = false;
  bool sleeping_ = false;
  uint32_t waiters_ = 0;
  uint32_t background_operations_ = 0;
  std::vector<Operation*> active_;
  std::deque<Operation*> held_;  // active, but not begun: collectives on device memory, in the group's order
  uint32_t device_collectives_running_ = 0;
  std::vector<Operation*> unsent_;  // point-to-point sends from a device, and sends behind them, in the calls' order
  // Settled, their callbacks not called yet; linked through the operations, so that nothing is allocated at an end.
  Operation* first_settled_ = nullptr;
  Operation* last_settled_ = nullptr;
  std::vector<pollfd> poll_fds_;  // of the driver's last sleep
  std::atomic<uint64_t> sequence_{0};
  uint64_t next_deadline_us_ = UINT64_MAX;
  sennit_status ended_ = SENNIT_OK;
  std::string end_reason_;
  std::vector<uint32_t> lost_;  // whom the failure blames
  bool stopping_ = false;
  const WakeEvent wake_event_;
  std::thread thread_;
  std::thread::id thread_id_;
  std::condition_variable thread_joined_;
  bool has_joined_ = false;
  std::atomic<uint32_t> references_{1};
  std::atomic<uint64_t> last_round_us_{0};
  uint64_t idle_answers_ = 0;  // of the answering thread alone
  AnsweringThread answering_;  // last: it uses all of the above
};

uint64_t clock_us();

}  // namespace sennit
