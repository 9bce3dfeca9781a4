// SPDX-License-Identifier: Apache-2.0
// How operations and groups end: which rank is to blame, the error texts, the notice to the peers, and who calls back.
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <new>

#include "executor/engine.hpp"
#include "trace/tracepoints.hpp"

namespace sennit {
namespace {

// A peer that an operation waited for counts as silent (stopped or cut off) if it gave no sign of life for this long
// before the deadline. In this time it gets two questions over a network, or misses two beats in shared memory.
constexpr uint64_t SILENT_US = 500'000;

// A rank at its deadline that heard from all peers that it waits for gives the others this long: in an algorithm where
// each rank waits for few, another one may know who is silent.
constexpr uint64_t WORD_US = 200'000;

// Short enough for a std::string without allocation, like all texts that are used when memory is short.
constexpr const char* OUT_OF_MEMORY = "out of memory";

uint64_t silence_limit_us(uint64_t timeout_us) { return std::min(SILENT_US, timeout_us / 2); }

std::string seconds(uint64_t time_us) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(time_us) / 1e6);
  return text;
}

std::string rank_list(const std::vector<uint32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (const uint32_t rank : ranks) text.append(rank == ranks.front() ? "" : ", ").append(std::to_string(rank));
  return text;
}

}  // namespace

void Engine::check_failures(uint64_t now_us) {
  if (ended_ != SENNIT_OK) return;
  for (const Port* port : ports_) {
    const std::string reason(port->failure());
    if (reason.empty()) continue;
    FailureNotice notice{{config_.rank}, "rank " + std::to_string(config_.rank) + " cannot go on: " + reason};
    end(SENNIT_DEVICE, reason, std::move(notice), Farewell::notice);
    return;
  }
  if (const MailboxFailure* failure = mailbox_.failure()) {
    switch (failure->kind) {
      case MailboxFailure::Kind::mismatch:
        end(SENNIT_MISMATCH, failure->reason, {{}, failure->reason}, Farewell::notice);
        return;
      case MailboxFailure::Kind::peer_lost: {
        FailureNotice notice{{}, "rank " + std::to_string(failure->peer) + " " + failure->reason};
        for (uint32_t peer = 0; peer < config_.world; ++peer) {
          if (mailbox_.lost(peer) || is_as_good_as_lost(peer)) notice.lost.push_back(peer);
        }
        if (notice.lost.size() > 1) notice.reason += "; lost in all: " + rank_list(notice.lost);
        notice.reason += " (" + mailbox_.lane(failure->peer)->describe() + ")";
        end(SENNIT_PEER, notice.reason, notice, Farewell::notice);
        return;
      }
      case MailboxFailure::Kind::peer_aborted:
        fail_as_told(failure->peer, FailureNotice::decode(failure->reason, config_.world));
        return;
    }
  }
  next_deadline_us_ = UINT64_MAX;
  for (const Operation* operation : active_) {
    uint64_t until_us = operation->deadline_us_;
    if (until_us <= now_us) {
      const std::vector<uint32_t> awaited = mailbox_.awaited();
      const std::vector<uint32_t> silent = silent_of(awaited, *operation, now_us);
      const bool others_may_know = silent.empty() && !awaited.empty() && awaited.size() + 1 < config_.world;
      if (others_may_know) until_us += std::min(WORD_US, operation->timeout_us_ / 2);
      if (until_us <= now_us) {
        fail_late(*operation, awaited, silent);
        return;
      }
    }
    next_deadline_us_ = std::min(next_deadline_us_, until_us);
  }
}

// Whether the peer has been silent almost as long as the rank just lost. Ranks of one host fall silent together.
bool Engine::is_as_good_as_lost(uint32_t peer) const {
  const Lane* const lane = mailbox_.lane(peer);
  return lane != nullptr && lane->silent_us() >= config_.peer_timeout_us - config_.peer_timeout_us / 8;
}

// The reporter is named last, because the ranks to blame matter most.
void Engine::fail_as_told(uint32_t reporter, const FailureNotice& notice) {
  const std::string who = "rank " + std::to_string(reporter);
  const bool is_blamed = std::find(notice.lost.begin(), notice.lost.end(), config_.rank) != notice.lost.end();
  std::string reason = notice.reason.empty() ? who + " ended the group" : notice.reason;
  if (is_blamed) {
    reason = "the others gave up this rank (" + std::to_string(config_.rank) + "): " + reason;
  }
  // "rank 2 aborted: ..." already names the reporter.
  if (!reason.starts_with(who + " ")) reason += " (reported by " + who + ")";
  end(SENNIT_PEER, std::move(reason), notice, Farewell::notice);
}

// Nothing is known of ranks that are not awaited, because nobody asked them.
std::vector<uint32_t> Engine::silent_of(const std::vector<uint32_t>& awaited, const Operation& operation,
                                        uint64_t now_us) const {
  std::vector<uint32_t> silent;
  for (const uint32_t peer : awaited) {
    const Lane* lane = mailbox_.lane(peer);
    const uint64_t since_us = lane == nullptr ? now_us : std::max(lane->heard_us(), operation.posted_us());
    if (since_us + silence_limit_us(operation.timeout_us_) <= now_us) silent.push_back(peer);
  }
  return silent;
}

void Engine::fail_late(const Operation& operation, const std::vector<uint32_t>& awaited,
                       const std::vector<uint32_t>& silent) {
  std::string reason = operation.describe() + " timed out on rank " + std::to_string(config_.rank) +
                       ": not finished within its timeout of " + seconds(operation.timeout_us_);
  if (std::find(held_.begin(), held_.end(), &operation) != held_.end()) {
    reason += "; it waits for earlier operations on device memory";
  } else if (!operation.has_number()) {
    reason += "; it waits for callbacks of earlier operations of the group";
  } else if (const uint32_t copies = operation.copies_running(); copies != 0) {
    reason += "; it waits for " + std::to_string(copies) + " copies between host and device";
  }
  if (!silent.empty())
    reason +=
        "; no sign of life from " + rank_list(silent) + " for " + seconds(silence_limit_us(operation.timeout_us_));
  const std::string outstanding = mailbox_.describe_outstanding();
  FailureNotice notice{silent, silent.empty() ? reason + "; awaited: " + rank_list(awaited) : reason};
  if (!outstanding.empty()) reason += "; " + outstanding;
  end(SENNIT_TIMEOUT, std::move(reason), std::move(notice), Farewell::notice);
}

void Engine::end(sennit_status status, std::string reason, FailureNotice notice, Farewell farewell) noexcept {
  if (ended_ != SENNIT_OK) return;
  ended_ = status;
  end_reason_ = std::move(reason);
  mailbox_.abandon();
  say_farewell(notice, farewell);
  lost_ = std::move(notice.lost);
  for (Port* port : ports_) port->revoke();
  // Nothing reads or writes the operations' memory any more, so their owners may have it back.
  while (!active_.empty()) {
    Operation* operation = active_.back();
    std::string text;
    try {
      text = operation->describe();
      // The reason of the operation that was late begins with its name.
      text = end_reason_.rfind(text + " timed out", 0) == 0 ? end_reason_ : text + ": " + end_reason_;
    } catch (const std::bad_alloc&) {
      text = OUT_OF_MEMORY;
    }
    finish(operation, status, std::move(text));
  }
  if (sleeping_ != Sleep::awake) wake();
}

// Best effort: peers that do not hear it find out by themselves.
void Engine::say_farewell(const FailureNotice& notice, Farewell farewell) noexcept {
  for (Port* port : ports_) {
    try {
      farewell == Farewell::goodbye ? port->close() : port->abort(notice.encode());
    } catch (...) {
    }
  }
}

// To be called within an exception handler.
void Engine::end_in_doubt() noexcept {
  std::string reason;
  FailureNotice notice;
  try {
    try {
      throw;
    } catch (const std::bad_alloc&) {
      reason = OUT_OF_MEMORY;
    } catch (const std::exception& error) {
      reason = error.what();
    } catch (...) {
      reason = "unknown error";
    }
    notice = {{config_.rank}, "rank " + std::to_string(config_.rank) + " cannot go on: " + reason};
  } catch (...) {
    reason = OUT_OF_MEMORY;
  }
  end(SENNIT_DEVICE, std::move(reason), std::move(notice), Farewell::notice);
}

void Engine::finish(Operation* operation, sennit_status status, std::string reason) noexcept {
  active_.erase(std::find(active_.begin(), active_.end(), operation));
  if (operation->background_) --background_operations_;
  std::erase(unsent_, operation);
  if (const auto held = std::find(held_.begin(), held_.end(), operation); held != held_.end()) {
    held_.erase(held);
  } else if (operation->on_device() && operation->is_collective()) {
    --device_collectives_running_;
  }
  // Once the operation is settled, its owner may free the memory.
  if (verbs_)
    operation->for_each_memory([this](const void* data, uint64_t size_bytes) { verbs_->give_back(data, size_bytes); });
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
  std::string text = OUT_OF_MEMORY;
  FailureNotice notice;
  try {
    text = reason;
    notice.reason = "rank " + std::to_string(config_.rank) + " aborted: " + text;
  } catch (const std::bad_alloc&) {
  }
  end(SENNIT_ABORTED, std::move(text), std::move(notice), Farewell::notice);
  let_go(lock);
}

void Engine::shutdown(uint64_t timeout_us) {
  Callbacks::stand_aside();
  {
    Lock lock = enter();
    const uint64_t give_up_us = clock_us() + timeout_us;
    auto busy = [this] {
      if (!mailbox_.idle()) return true;
      return std::any_of(ports_.begin(), ports_.end(), [](const Port* port) { return !port->idle(); });
    };
    {
      backoff_.reset();
      const Waiting waiting(*this);  // asks a background driver for the role
      while (ended_ == SENNIT_OK && (busy() || driving_) && clock_us() < give_up_us) {
        if (driving_) {
          if (sleeping_ != Sleep::awake) wake();
          role_free_.wait_for(lock, std::chrono::milliseconds(1));
          continue;
        }
        const Driving driving(*this);
        drive_once(lock);
      }
    }
    std::string reason = OUT_OF_MEMORY;
    try {
      reason = "the communicator was shut down";
    } catch (const std::bad_alloc&) {
    }
    end(SENNIT_ABORTED, std::move(reason), {}, Farewell::goodbye);
    stopping_ = true;
    if (sleeping_ != Sleep::awake) wake();
    let_go(lock);
  }
  callbacks_->wait(called_back_, timeout_us);
  leave_threads();
}

std::string Engine::failure() {
  Lock lock = enter();
  return ended_ == SENNIT_OK ? std::string() : end_reason_;
}

std::vector<uint32_t> Engine::lost_ranks() {
  Lock lock = enter();
  return lost_;
}

std::vector<uint32_t> Engine::find_gone_ranks() {
  Lock lock = enter();
  const uint64_t now_us = clock_us();
  std::vector<uint32_t> gone;
  for (Port* port : ports_) {
    for (const uint32_t peer : port->find_gone(now_us)) gone.push_back(peer);
  }
  std::sort(gone.begin(), gone.end());
  return gone;
}

}  // namespace sennit
