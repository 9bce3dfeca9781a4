// SPDX-License-Identifier: Apache-2.0
// Which peers of a port have work now, and when each of the others will: a round costs nothing for idle peers.
//
// A member stands for one peer. Whatever may give it work wakes it: a call of the message side, a packet, a bell. The
// port's round visits the ready members. Then settle() asks each of them when its next visit is due: now, or at a time
// that goes into a binary heap, or not before somebody wakes it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sennit::flow {

class Agenda {
 public:
  static constexpr uint64_t NEVER_US = UINT64_MAX;

  // Returns the number of a new member, which is ready. Numbers count from 0.
  uint32_t join() {
    members_.emplace_back();
    const auto number = static_cast<uint32_t>(members_.size() - 1);
    heap_.reserve(members_.size());
    ready_.reserve(members_.size());
    wake(number);
    return number;
  }
  // The time of the round, for calls of the message side between two rounds.
  void set_now(uint64_t now_us) { now_us_ = now_us; }
  uint64_t now_us() const { return now_us_; }

  // Allocates nothing.
  void wake(uint32_t number) noexcept {
    Member& member = members_[number];
    if (member.is_ready) return;
    member.is_ready = true;
    ready_.push_back(number);
    if (member.place != NOWHERE) take_from_heap(member.place);
  }
  // Wakes the members whose time has come.
  void wake_due(uint64_t now_us) noexcept {
    while (next_due_us() <= now_us) wake(heap_.front());
  }
  // In the order in which they woke. It grows while members wake each other, so take the size anew in a loop.
  const std::vector<uint32_t>& ready() const { return ready_; }
  // The earliest time of the members that are not ready.
  uint64_t next_due_us() const { return heap_.empty() ? NEVER_US : members_[heap_.front()].due_us; }

  // Ends a round. `due_us(number)` says when the ready member's next visit is due. Up to `now_us` it stays ready.
  template <class Due>
  void settle(uint64_t now_us, Due due_us) {
    visits_ += ready_.size();
    size_t kept = 0;
    for (const uint32_t number : ready_) {
      const uint64_t at_us = due_us(number);
      if (at_us <= now_us) {
        ready_[kept++] = number;
        continue;
      }
      members_[number].is_ready = false;
      if (at_us == NEVER_US) continue;
      members_[number].due_us = at_us;
      heap_.push_back(number);
      move_up(heap_.size() - 1);
    }
    ready_.resize(kept);
  }
  // Members that all rounds together have visited.
  uint64_t visits() const { return visits_; }

 private:
  static constexpr size_t NOWHERE = SIZE_MAX;
  struct Member {
    uint64_t due_us = 0;
    size_t place = NOWHERE;  // in heap_, where every member stands once at most
    bool is_ready = false;
  };

  void put(size_t place, uint32_t number) {
    heap_[place] = number;
    members_[number].place = place;
  }
  void move_up(size_t place) {
    const uint32_t number = heap_[place];
    for (; place != 0 && members_[number].due_us < members_[heap_[(place - 1) / 2]].due_us; place = (place - 1) / 2)
      put(place, heap_[(place - 1) / 2]);
    put(place, number);
  }
  void take_from_heap(size_t place) {
    members_[heap_[place]].place = NOWHERE;
    const uint32_t last = heap_.back();
    heap_.pop_back();
    if (place == heap_.size()) return;
    // The last member fills the gap. It may belong further down or further up.
    for (size_t child; (child = 2 * place + 1) < heap_.size(); place = child) {
      if (child + 1 < heap_.size() && members_[heap_[child + 1]].due_us < members_[heap_[child]].due_us) ++child;
      if (members_[heap_[child]].due_us >= members_[last].due_us) break;
      put(place, heap_[child]);
    }
    heap_[place] = last;
    move_up(place);
  }

  std::vector<Member> members_;
  std::vector<uint32_t> ready_, heap_;
  uint64_t now_us_ = 0, visits_ = 0;
};

// The caller's clock during one of its calls. What happens late in the call gets a later time.
class CallClock {
 public:
  explicit CallClock(uint64_t now_us) : called_us_(now_us) {}

  uint64_t now_us() const {
    const auto passed = std::chrono::steady_clock::now() - called_;
    return called_us_ + static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(passed).count());
  }

 private:
  const uint64_t called_us_;
  const std::chrono::steady_clock::time_point called_ = std::chrono::steady_clock::now();
};

}  // namespace sennit::flow
