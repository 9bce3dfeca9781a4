// SPDX-License-Identifier: Apache-2.0
// One run of a plan: which steps are done, which loans are out, how it ended.
//
// Network steps go to the mailbox the moment they are ready; folds run next, while the received bytes are in cache;
// copies run when the network has nothing to do. No step waits by blocking.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "executor/plan.hpp"
#include "messages/mailbox.hpp"
#include "sennit/core.h"

namespace sennit {

class Engine;

class Operation final : public MailboxClient {
 public:
  Operation(Engine& engine, Plan& plan, const sennit_buffer* buffers, const sennit_post_options& options,
            uint64_t sequence);
  ~Operation() override;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // Engine's lock held in all of these.
  void start();
  // Runs what is ready; `copies` false leaves local copies for later. True when anything ran.
  bool run_ready(bool copies);
  bool has_copies() const { return !ready_copies_.empty(); }
  // The memory that steps read or write, from post to end.
  template <class Visit>
  void for_each_memory(Visit visit) const {
    for (uint32_t index = 0; index < plan_.buffer_count; ++index) visit(buffers_[index], plan_.buffer_extents[index]);
    visit(scratch_.get(), plan_.scratch_bytes);
  }
  bool finished_steps() const { return steps_left_ == 0; }
  void on_message_sent(uint32_t step) override;
  void on_message_received(uint32_t step, uint32_t peer, const std::byte* view, uint64_t loan) override;

  // Ends the operation.
  void settle(sennit_status status, std::string reason) noexcept;
  struct Callback {
    void (*function)(void*) = nullptr;
    void* argument = nullptr;
  };
  Callback take_callback();
  bool set_callback(Callback callback);  // false: already settled, the caller calls

  sennit_status status() const { return static_cast<sennit_status>(status_.load(std::memory_order_acquire)); }
  const std::string& error() const { return error_; }
  uint32_t source() const { return source_; }
  uint64_t sequence() const { return sequence_; }
  uint64_t deadline_us() const { return deadline_us_; }
  uint64_t posted_us() const { return deadline_us_ - timeout_us_; }
  bool background() const { return background_; }
  std::string describe() const;
  Engine& engine() const { return *engine_; }

  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  void release();

 private:
  friend class Engine;
  struct View {
    const std::byte* data = nullptr;
    uint64_t loan = 0;
  };

  void ready(uint32_t step);
  const Step& begin(uint32_t step) const;
  void done(uint32_t step);
  void dispatch_network(uint32_t step);
  void run_copy(uint32_t step);
  void run_reduce(uint32_t step);
  std::byte* destination(const Step& step) const;
  const std::byte* source(const Operand& operand) const;
  MessageHeader header(const Step& step) const;

  Engine* engine_;  // kept alive by a reference
  Plan& plan_;
  std::vector<std::byte*> buffers_;
  std::unique_ptr<std::byte[]> scratch_;
  std::vector<uint32_t> waits_;
  std::vector<View> views_;  // by step, only if the plan has loans
  std::vector<const void*> operands_;
  std::vector<uint32_t> ready_network_;
  std::vector<uint32_t> ready_folds_;
  std::deque<uint32_t> ready_copies_;
  uint32_t steps_left_;
  const uint64_t sequence_;
  const uint64_t key_base_;
  const double scalar_;
  uint64_t deadline_us_ = UINT64_MAX;
  uint64_t timeout_us_ = 0;
  bool background_ = false;
  uint32_t source_ = SENNIT_ANY_PEER;
  std::string error_;
  Callback callback_;
  Operation* next_settled_ = nullptr;  // the engine's: settled behind this one
  std::atomic<int> status_{SENNIT_PENDING};
  std::atomic<uint32_t> references_{1};
};

}  // namespace sennit
