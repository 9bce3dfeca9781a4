// SPDX-License-Identifier: Apache-2.0
// KeyIndex: (peer, key) -> first-in-first-out list of record numbers. Every small collective uses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "flow/probe_table.hpp"

namespace sennit {

class KeyIndex {
 public:
  static constexpr uint32_t NONE = UINT32_MAX;

  void push(uint32_t peer, uint64_t key, uint32_t record) {
    if (record >= next_.size()) next_.resize(record + 1, NONE);
    next_[record] = NONE;
    Queue& queue = queues_[{key, peer}];
    if (queue.head == NONE) {
      queue.head = record;
    } else {
      next_[queue.tail] = record;
    }
    queue.tail = record;
  }

  uint32_t front(uint32_t peer, uint64_t key) const {
    const size_t at = queues_.find({key, peer});
    return at == queues_.NONE ? NONE : queues_.value_at(at).head;
  }

  // Removes and returns the oldest record of the key.
  uint32_t pop(uint32_t peer, uint64_t key) {
    const size_t at = queues_.find({key, peer});
    if (at == queues_.NONE) return NONE;
    Queue& queue = queues_.value_at(at);
    const uint32_t record = queue.head;
    queue.head = next_[record];
    if (queue.head == NONE) queues_.erase_at(at);
    return record;
  }

  size_t size() const { return queues_.size(); }
  void clear() { queues_.clear(); }

 private:
  struct Key {
    uint64_t key = 0;
    uint32_t peer = 0;
    bool operator==(const Key&) const = default;
    // Keys differ in their low bits (slot) and in the operation sequence above these.
    friend constexpr uint64_t hash_of(const Key& of) { return of.key ^ static_cast<uint64_t>(of.peer) << 40; }
  };
  struct Queue {
    uint32_t head, tail;
    bool operator==(const Queue&) const = default;
  };

  ProbeTable<Key, Queue, Queue{NONE, NONE}> queues_{16};
  std::vector<uint32_t> next_;  // by record number
};

}  // namespace sennit
