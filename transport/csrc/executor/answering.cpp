// SPDX-License-Identifier: Apache-2.0
#include "executor/answering.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "executor/clock.hpp"
#include "executor/lent_time.hpp"

namespace sennit {

std::shared_ptr<Answering::Member> Answering::join(Look look) {
  auto member = std::make_shared<Member>();
  member->look = std::move(look);
  const std::lock_guard lock(mutex_);
  members_.push_back(member);
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([self = shared_from_this(), number = ++number_] { self->run(number); });
    } catch (...) {
      members_.pop_back();
      throw;
    }
  }
  wake_.notify_one();
  return member;
}

void Answering::leave(const std::shared_ptr<Member>& member) {
  std::unique_lock lock(mutex_);
  const bool was_member = std::erase(members_, member) != 0;
  looked_.wait(lock, [&] { return !member->is_looking; });
  if (!was_member || !members_.empty()) return;
  ++number_;
  std::thread ending = std::move(thread_);
  lock.unlock();
  wake_.notify_all();
  if (ending.joinable()) ending.join();
}

void Answering::run(uint64_t number) {
  begin_own_thread("sennit-answer");
  std::unique_lock lock(mutex_);
  while (number == number_) {
    const uint64_t next_us = look_around(lock, number);
    const uint64_t now_us = clock_us();
    if (number == number_ && next_us > now_us) wake_.wait_for(lock, std::chrono::microseconds(next_us - now_us));
  }
}

// Returns when the next look is due. A member that leaves meanwhile may move another one out of sight until the next
// call, which follows at once, because what was not seen is due.
uint64_t Answering::look_around(std::unique_lock<std::mutex>& lock, uint64_t number) {
  const uint64_t now_us = clock_us();
  for (size_t i = 0; i < members_.size() && number == number_; ++i) {
    if (members_[i]->due_us > now_us) continue;
    const std::shared_ptr<Member> member = members_[i];
    member->is_looking = true;
    lock.unlock();
    const uint64_t pause_us = member->look();
    lock.lock();
    // At multiples of the pause, so that one wake-up serves all groups.
    member->due_us = (clock_us() / pause_us + 1) * pause_us;
    member->is_looking = false;
    looked_.notify_all();
  }
  uint64_t next_us = now_us + 1'000'000;
  for (const auto& member : members_) next_us = std::min(next_us, member->due_us);
  return next_us;
}

}  // namespace sennit
