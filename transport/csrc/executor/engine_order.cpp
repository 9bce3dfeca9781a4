// SPDX-License-Identifier: Apache-2.0
// When a collective gets its number, and when callbacks that may post collectives begin (call_order.hpp).
#include <algorithm>

#include "executor/engine.hpp"
#include "trace/tracepoints.hpp"

namespace sennit {
namespace {

// How often a driver looks whether a callback blocks.
constexpr uint64_t LOOK_US = 50'000;

}  // namespace

Engine::Caller Engine::caller_here() const {
  if (ended_ != SENNIT_OK || !keeps_order_) return {};
  Operation* const caller = Callbacks::operation_here();
  if (caller == nullptr) return {.is_ordered = true};
  if (&caller->engine() != this || !caller->place_of_callbacks_.is_in) return {};
  return {.is_ordered = true, .place = &caller->place_of_callbacks_};
}

// Empty: the calling thread may post a collective.
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
    const bool keeps_order = ended_ == SENNIT_OK && keeps_order_;
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
  const auto is_behind = [&caller](const CallOrder::Place& wanted) {
    const CallOrder::Place* place = caller.next;
    while (place != nullptr && place != &wanted) place = place->next;
    return place != nullptr;
  };
  const auto move = [&](CallOrder::Place& place) {
    order_.remove(place);
    order_.insert(place, &caller);
  };
  CallOrder::Place& post = operation.place_of_post_;
  for (CallOrder::Place* place = is_behind(post) ? caller.next : nullptr; place != nullptr;) {
    CallOrder::Place* const next = place == &post ? nullptr : place->next;
    if (place->is_post) move(*place);
    place = next;
  }
  if (is_behind(operation.place_of_callbacks_)) move(operation.place_of_callbacks_);
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

}  // namespace sennit
