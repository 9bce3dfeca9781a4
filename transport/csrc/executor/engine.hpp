// SPDX-License-Identifier: Apache-2.0
// The engine of one communicator: ports, mailbox and the operations in flight, driven by whichever thread waits.
//
// One thread at a time is the driver: it runs rounds (ports, mailbox, ready steps) under the lock and gives the lock
// away between rounds. A thread in wait() becomes the driver if there is none; the background thread drives operations
// that nobody waits for. The first failure ends the communicator: every operation in flight fails with the same reason,
// the peers are told, and no user memory is touched any more.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

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
};

struct Route {
  enum class Kind { self, shm, udp, verbs } kind;  // verbs: to a peer of either of the last two
  std::vector<std::byte> info;                     // udp, verbs: the peer's local_info
};

struct EngineCounters {
  uint64_t operations_posted = 0, operations_completed = 0, operations_failed = 0;
  uint64_t operation_time_us = 0;  // of those completed: from post to end

  static constexpr const char* GROUP = "engine";
  static std::vector<std::string> names() {
    return {"operations_posted", "operations_completed", "operations_failed", "operation_time_us"};
  }
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

  sennit_status post(Plan& plan, const sennit_buffer* buffers, uint32_t buffer_count,
                     const sennit_post_options& options, Operation** out, std::string& error);
  sennit_status wait(Operation& operation, uint64_t timeout_us);
  void on_done(Operation& operation, Operation::Callback callback);
  void set_timeout(uint64_t timeout_us);  // the default deadline of operations posted from now on
  void abort(const std::string& reason);
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

  // An owner calls shutdown before its last release: the background thread keeps the engine alive.
  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  void release();

 private:
  using Lock = std::unique_lock<std::mutex>;

  ~Engine();
  Lock enter();  // takes the lock ahead of a driver that would take it again at once
  bool has_network() const { return udp_ || verbs_; }
  bool round(uint64_t now_us);
  void drive_once(Lock& lock, Backoff& backoff);
  void sleep(Lock& lock, uint64_t now_us);
  void wake();
  void finish(Operation* operation, sennit_status status, std::string reason);
  void run_callbacks(Lock& lock);
  void fail_all(sennit_status status, const std::string& reason, const FailureNotice& notice);
  void fail_as_told(uint32_t reporter, const FailureNotice& notice);
  void fail_late(const Operation& operation, uint64_t now_us);
  void check_failures(uint64_t now_us);
  void background();
  void start_background();

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
  std::vector<std::pair<Operation*, Operation::Callback>> settled_;  // callbacks to run without the lock
  std::atomic<uint64_t> sequence_{0};
  uint64_t next_deadline_us_ = UINT64_MAX;
  sennit_status ended_ = SENNIT_OK;
  std::string end_reason_;
  std::vector<uint32_t> lost_;  // whom the failure blames
  bool stopping_ = false;
  int wake_fd_ = -1;
  std::thread thread_;
  std::atomic<uint32_t> references_{1};
};

uint64_t clock_us();

}  // namespace sennit
