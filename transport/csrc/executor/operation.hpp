// SPDX-License-Identifier: Apache-2.0
// One run of a plan: which steps are done, which loans are out, how it ended.
//
// Network steps go to the mailbox as soon as they are ready, and copies of device memory to the owner of the device.
// Folds run next, while the received bytes are in the cache. Local copies run when the network has nothing to do. No
// step waits by blocking.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "executor/call_order.hpp"
#include "executor/callbacks.hpp"
#include "executor/operation_log.hpp"
#include "executor/plan.hpp"
#include "executor/scratch.hpp"
#include "executor/team.hpp"
#include "messages/mailbox.hpp"
#include "sennit/core.h"

namespace sennit {

class Engine;
class Operation;

// What runs operations: the engine of a group, or a rank of the testbed's simulator.
class OperationHost {
 public:
  OperationHost(uint32_t rank, uint32_t world, uint32_t threads, uint64_t spin_us)
      : mailbox_(rank, world), team_(threads, spin_us) {}
  OperationHost(const OperationHost&) = delete;
  OperationHost& operator=(const OperationHost&) = delete;

  Mailbox& mailbox() { return mailbox_; }
  const TeamUse& team() const { return team_; }
  // False: the operation's send must wait for another one of the same tag to the same peer.
  virtual bool may_send(const Operation& operation) const = 0;
  // The operation that begins will exchange this message with the aggregator.
  virtual void foresee(const MessageHeader& /*header*/, bool /*is_send*/) {}
  // The operation has begun, or a step of it is done. Not told again until the host clears the operation's has_news_.
  virtual void note_news(Operation& /*operation*/) {}
  // An operation holds a reference as long as it lives.
  virtual void retain() = 0;
  virtual void release() = 0;

 protected:
  ~OperationHost() = default;

  Mailbox mailbox_;
  const TeamUse team_;
};

// The owner of a device refused.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The memory of an operation: the caller's buffers, or the device to which they belong.
struct OperationMemory {
  std::span<const sennit_buffer> buffers;
  const sennit_device* device = nullptr;
};

class Operation final : public MailboxClient {
 public:
  // The plan's sizes for the counts of a post. Throws PlanError if counts, memory or factor do not fit the plan.
  static std::shared_ptr<const RunSizes> check(Plan& plan, const OperationMemory& memory,
                                               const sennit_post_options& options);
  // `sequence`: 0 if it is point-to-point, or if number() follows. `sizes`: of check().
  Operation(OperationHost& host, Plan& plan, const OperationMemory& memory, const sennit_post_options& options,
            uint64_t sequence, std::shared_ptr<const RunSizes> sizes);
  ~Operation() override;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // The engine's lock is held in all of these.
  // Before a start on a device. Throws DeviceError.
  void take_scratch();
  void drop_scratch() { has_memory_ = false; }
  // Gives a collective its place in the group's order, before its start.
  void number(uint64_t sequence);
  bool has_number() const { return !is_collective() || sequence() != 0; }
  void start();
  bool on_device() const { return device_.copy != nullptr; }
  bool has_loans() const { return plan_.has_loans; }
  bool is_collective() const { return (key_base_ & P2P_KEY) == 0; }
  // Runs the ready steps. `copies` false leaves local copies for later. True when anything ran.
  bool run_ready(bool copies);
  bool has_copies() const { return next_copy_ != ready_copies_.size(); }
  // Visits the host memory that steps read or write.
  template <class Visit>
  void for_each_memory(Visit visit) const {
    if (!has_memory_) return;
    const uint32_t first = on_device() ? plan_.buffer_count : 0;
    for (uint32_t index = first; index <= plan_.buffer_count; ++index) {
      visit(buffers_[index], sizes_->buffer_extents[index]);
    }
  }
  const Plan& plan() const { return plan_; }
  const RunSizes& sizes() const { return *sizes_; }
  uint64_t signature() const { return signature_; }
  bool finished_steps() const { return steps_left_ == 0; }
  void on_message_sent(uint32_t step) override;
  void on_message_received(uint32_t step, uint32_t peer, const std::byte* data, uint64_t loan) override;
  void on_copy_done(uint32_t step);
  // Point-to-point: whether both send to the same peer with the same tag, so that the order of the calls must hold.
  bool shares_order_with(const Operation& other) const {
    return key_base_ == other.key_base_ && plan_.p2p_send_peer == other.plan_.p2p_send_peer;
  }
  bool sends_alone() const { return !is_collective() && plan_.p2p_send_peer != SENNIT_ANY_PEER; }
  bool is_sent() const { return is_sent_; }
  bool holds_send() const { return held_send_ != NO_STEP; }
  void dispatch_held_send();

  // Ends the operation.
  void settle(sennit_status status, std::string reason) noexcept;
  struct Callback {
    void (*function)(void*) = nullptr;
    void* argument = nullptr;
  };
  Callback take_callback();
  // Call it before take_callback: it tells the owner of the device.
  Callback take_device_callback();
  bool has_callbacks() const { return callback_.function != nullptr || device_.ended != nullptr; }
  void set_callback(Callback callback) { callback_ = callback; }

  sennit_status status() const { return static_cast<sennit_status>(status_.load(std::memory_order_acquire)); }
  const std::string& error() const { return error_; }
  uint32_t source() const { return source_; }
  // 0: point-to-point, or without a number yet.
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }
  uint64_t posted_us() const { return deadline_us_ - timeout_us_; }
  bool background() const { return background_; }
  std::string describe() const;
  // For the log of operations: the call that posted it is over; a thread begins to wait.
  void note_return() {
    if (times_.posted_ns != 0) times_.returned_ns = clock_ns();
  }
  void note_wait() {
    if (times_.posted_ns != 0 && status() == SENNIT_PENDING) times_.note_wait();
  }
  // Copies between host and device that have not ended.
  uint32_t copies_running() const { return copies_running_; }
  // The engine. Only an operation that an engine made has one.
  Engine& engine() const;

  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  void release();

 private:
  friend class Engine;
  friend class Callbacks;
  struct Loan {
    const std::byte* data = nullptr;
    uint64_t id = 0;
  };

  static constexpr uint32_t NO_STEP = UINT32_MAX;

  void tell_news() {
    if (!std::exchange(has_news_, true)) host_->note_news(*this);
  }
  void ready(uint32_t step);
  void take_branch(uint32_t step);
  void ready_in_order(uint32_t list);
  const Step& begin(uint32_t step) const;
  uint64_t size_bytes(const Step& step) const { return sizes_->bytes(step.size_bytes); }
  // Whether the bytes of a receive stay in the transport. An empty message is no loan.
  bool is_loan(const Step& step) const { return (step.flags & STEP_LOAN) != 0 && size_bytes(step) != 0; }
  void done(uint32_t step);
  void pass(const Step& step);
  void dispatch(uint32_t step);
  void dispatch_device_copy(uint32_t step);
  bool run_copy_piece(uint32_t step);
  bool run_code_piece(uint32_t step);
  bool run_lossless_piece(uint32_t step);
  void run_reduce(uint32_t step);
  bool open_loans(const Step& step);
  std::byte* destination(const Step& step) const;
  const std::byte* source(const Operand& operand) const;
  MessageHeader header(const Step& step) const;

  OperationHost* host_;  // kept alive by a reference
  Plan& plan_;
  const std::shared_ptr<const RunSizes> sizes_;
  std::vector<std::byte*> buffers_;
  ScratchPool::Memory scratch_;
  std::vector<uint32_t> waits_;
  std::vector<Loan> loans_;                  // one for each step, only if the plan has loans
  std::vector<FoldSource> operands_;         // of the reduction that runs, for each of the threads that share it
  std::vector<uint32_t> ready_to_dispatch_;  // completed later, by the mailbox or the owner of the device
  std::vector<uint32_t> ready_folds_;
  std::vector<uint32_t> ready_copies_;
  size_t next_copy_ = 0;       // the first of ready_copies_ that is not done
  uint64_t copied_bytes_ = 0;  // of that copy; of an encoding or decoding, elements
  uint64_t coded_bytes_ = 0;   // of that copy, if it is a lossless encoding or decoding
  uint32_t steps_left_;
  sennit_device device_{};
  uint32_t copies_running_ = 0;             // steps of the device
  bool has_memory_ = false;                 // false while an operation on a device waits for its turn
  std::array<uint32_t, 3> next_ordered_{};  // one for each list of plan_.ordered
  bool is_sent_ = false;                    // point-to-point: the message is in the mailbox
  uint32_t held_send_ = NO_STEP;
  std::atomic<uint64_t> sequence_;
  uint64_t key_base_;
  const double scalar_;
  const uint64_t seed_;
  const uint64_t signature_;  // of its messages
  uint64_t deadline_us_ = UINT64_MAX;
  uint64_t timeout_us_ = 0;
  bool background_ = false;
  OperationTimes times_;
  size_t place_ = 0;       // among the engine's active operations
  uint64_t post_ = 0;      // its number among the engine's posts
  bool has_news_ = false;  // the host will look at it
  uint32_t source_ = SENNIT_ANY_PEER;
  std::string error_;
  Callback callback_;
  Operation* next_settled_ = nullptr;          // the operation that settled after this one, in the list where both are
  Callbacks::Member* callbacks_of_ = nullptr;  // in a list of Callbacks
  uint32_t callback_level_ = 0;
  CallOrder::Place place_of_post_{this, true}, place_of_callbacks_{this, false};
  bool is_of_callback_ = false;      // posted within a callback
  bool is_called_in_order_ = false;  // its callbacks had a place in the order
  uint64_t passed_at_ = UINT64_MAX;  // the group's sequence when its callbacks lost their place in the order
  std::atomic<int> status_{SENNIT_PENDING};
  std::atomic<uint32_t> references_{1};
};

}  // namespace sennit
