// SPDX-License-Identifier: Apache-2.0
// KeyIndex: (peer, key) -> first-in-first-out list of record numbers. Open addressing with linear probing and
// backward-shift deletion (Knuth, TAOCP 3, 6.4 algorithm R), because every small collective passes through it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sennit {

class KeyIndex {
 public:
  static constexpr uint32_t NONE = UINT32_MAX;

  KeyIndex() : slots_(16), next_() {}

  void push(uint32_t peer, uint64_t key, uint32_t record) {
    if (record >= next_.size()) next_.resize(record + 1, NONE);
    next_[record] = NONE;
    Slot& slot = find_or_insert(peer, key);
    if (slot.head == NONE) {
      slot.head = record;
    } else {
      next_[slot.tail] = record;
    }
    slot.tail = record;
  }

  uint32_t front(uint32_t peer, uint64_t key) const {
    const size_t at = find(peer, key);
    return at == slots_.size() ? NONE : slots_[at].head;
  }

  // The oldest record of the key, removed.
  uint32_t pop(uint32_t peer, uint64_t key) {
    const size_t at = find(peer, key);
    if (at == slots_.size()) return NONE;
    const uint32_t record = slots_[at].head;
    slots_[at].head = next_[record];
    if (slots_[at].head == NONE) erase(at);
    return record;
  }

  size_t size() const { return used_; }
  void clear() {
    slots_.assign(16, Slot{});
    used_ = 0;
  }

 private:
  struct Slot {
    uint64_t key = 0;
    uint32_t peer = 0;
    uint32_t head = NONE;  // NONE: the slot is empty
    uint32_t tail = NONE;
  };

  size_t home(uint32_t peer, uint64_t key) const {
    // Fibonacci hashing: keys differ in their low bits (slot) and in the operation sequence above them.
    const uint64_t mixed = (key ^ (static_cast<uint64_t>(peer) << 40)) * 0x9E3779B97F4A7C15u;
    return static_cast<size_t>(mixed >> 32) & (slots_.size() - 1);
  }

  size_t find(uint32_t peer, uint64_t key) const {
    for (size_t at = home(peer, key); slots_[at].head != NONE; at = (at + 1) & (slots_.size() - 1)) {
      if (slots_[at].key == key && slots_[at].peer == peer) return at;
    }
    return slots_.size();
  }

  Slot& find_or_insert(uint32_t peer, uint64_t key) {
    if ((used_ + 1) * 2 > slots_.size()) grow();
    size_t at = home(peer, key);
    while (slots_[at].head != NONE) {
      if (slots_[at].key == key && slots_[at].peer == peer) return slots_[at];
      at = (at + 1) & (slots_.size() - 1);
    }
    ++used_;
    slots_[at] = {key, peer, NONE, NONE};
    return slots_[at];
  }

  void erase(size_t hole) {
    const size_t mask = slots_.size() - 1;
    slots_[hole].head = NONE;
    --used_;
    for (size_t at = (hole + 1) & mask; slots_[at].head != NONE; at = (at + 1) & mask) {
      const size_t wanted = home(slots_[at].peer, slots_[at].key);
      // Move back unless its home lies cyclically between the hole and where it is.
      if (((at - wanted) & mask) >= ((at - hole) & mask)) {
        slots_[hole] = slots_[at];
        slots_[at].head = NONE;
        hole = at;
      }
    }
  }

  void grow() {
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.head == NONE) continue;
      size_t at = home(slot.peer, slot.key);
      while (slots_[at].head != NONE) at = (at + 1) & (slots_.size() - 1);
      slots_[at] = slot;
    }
  }

  std::vector<Slot> slots_;
  std::vector<uint32_t> next_;  // by record number
  size_t used_ = 0;
};

}  // namespace sennit
