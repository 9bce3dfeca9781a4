// SPDX-License-Identifier: Apache-2.0
// The next events: a radix heap (Ahuja, Mehlhorn, Orlin, Tarjan: Faster Algorithms for the Shortest Path Problem,
// JACM 1990), because simulated time never runs backwards.
//
// Events of the same time come out in the order in which they went in. An event's bucket depends only on its time and
// on the last event taken. So events of one time are always together, in order, and runs are reproducible.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace sennit::fabric {

struct Event {
  enum class Kind : uint32_t { arrival, nic, timer, change };
  uint64_t at_ps;
  Kind kind;
  uint32_t index;  // of the packet, host, endpoint or change
};

class EventQueue {
 public:
  uint64_t now_ps() const { return last_ps_; }
  bool empty() const { return size_ == 0; }
  // The event must not be before now_ps().
  void push(const Event& event) {
    const size_t bucket = bucket_of(event.at_ps);
    buckets_[bucket].push_back(event);
    if (bucket != 0) filled_ |= uint64_t{1} << (bucket - 1);
    ++size_;
  }
  // Must not be called when empty.
  Event pop() {
    if (taken_ == buckets_[0].size()) refill();
    --size_;
    return buckets_[0][taken_++];
  }

 private:
  size_t bucket_of(uint64_t at_ps) const { return static_cast<size_t>(std::bit_width(at_ps ^ last_ps_)); }

  void refill() {
    buckets_[0].clear();
    taken_ = 0;
    const auto first = static_cast<size_t>(std::countr_zero(filled_)) + 1;
    std::vector<Event>& source = buckets_[first];
    filled_ &= filled_ - 1;
    last_ps_ = std::ranges::min(source, {}, &Event::at_ps).at_ps;
    size_ -= source.size();
    for (const Event& event : source) push(event);
    source.clear();
  }

  std::array<std::vector<Event>, 65> buckets_;
  uint64_t filled_ = 0;  // bit i: bucket i + 1 holds something
  uint64_t last_ps_ = 0, size_ = 0;
  size_t taken_ = 0;
};

}  // namespace sennit::fabric
