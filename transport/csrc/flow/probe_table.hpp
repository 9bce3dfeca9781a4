// SPDX-License-Identifier: Apache-2.0
// A hash table for the lookups that every packet and every message needs: open addressing with linear probing and
// backward-shift deletion (Knuth, TAOCP 3, 6.4, algorithm R). It grows when it is more than half full, so that probes
// stay short.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sennit {

constexpr uint64_t hash_of(uint32_t key) { return key; }

// `EMPTY` is a value that no key has. Other types of keys bring their own `hash_of`. Equal keys need equal bits; the
// table mixes them.
template <class Key, class Value, Value EMPTY>
class ProbeTable {
 public:
  static constexpr size_t NONE = SIZE_MAX;

  // `cell_count`: a power of two, at least a run.
  explicit ProbeTable(size_t cell_count) { resize(cell_count); }

  size_t size() const { return used_; }
  // Returns where the key is, valid until the next insertion or erasure. NONE: it is not in the table.
  size_t find(const Key& key) const {
    const size_t at = locate(key);
    return cells_[at].value == EMPTY ? NONE : at;
  }
  Value& value_at(size_t at) { return cells_[at].value; }
  const Value& value_at(size_t at) const { return cells_[at].value; }
  // Returns the key's value. The value of a new key is EMPTY and must be set at once.
  Value& operator[](const Key& key) {
    size_t at = locate(key);
    if (cells_[at].value == EMPTY) {
      if ((used_ + 1) * 2 > cells_.size()) {
        grow();
        at = locate(key);
      }
      ++used_;
      cells_[at].key = key;
    }
    return cells_[at].value;
  }
  void erase_at(size_t hole) {
    for (size_t at = next(hole); !(cells_[at].value == EMPTY); at = next(at)) {
      // Moves back, unless its home lies cyclically between the hole and its present cell.
      if (distance(home(cells_[at].key), at) < distance(hole, at)) continue;
      cells_[hole] = cells_[at];
      hole = at;
    }
    cells_[hole].value = EMPTY;
    --used_;
  }
  void clear() {
    std::fill(cells_.begin(), cells_.end(), Cell{});
    used_ = 0;
  }

 private:
  static constexpr uint32_t RUN_BITS = 3;
  static constexpr uint64_t RUN_MASK = (1 << RUN_BITS) - 1;
  struct Cell {
    Key key{};
    Value value = EMPTY;
  };

  // Fibonacci hashing (Knuth, 6.4): the golden ratio spreads keys that differ in few bits. The top bits are best mixed.
  // Packets come in runs, so keys that differ in the last bits alone are neighbours, most of them in one cache line.
  size_t home(const Key& key) const {
    const uint64_t hash = hash_of(key);
    return (((hash >> RUN_BITS) * 0x9E37'79B9'7F4A'7C15 >> shift_) & ~RUN_MASK) | (hash & RUN_MASK);
  }
  size_t next(size_t at) const { return (at + 1) & (cells_.size() - 1); }
  size_t distance(size_t from, size_t to) const { return (to - from) & (cells_.size() - 1); }
  // Returns the key's cell, or the empty cell where it belongs.
  size_t locate(const Key& key) const {
    size_t at = home(key);
    while (!(cells_[at].value == EMPTY) && !(cells_[at].key == key)) at = next(at);
    return at;
  }
  void resize(size_t cell_count) {
    cells_.resize(cell_count);
    shift_ = 64 - static_cast<uint32_t>(std::countr_zero(cell_count));
  }
  void grow() {
    std::vector<Cell> old;
    old.swap(cells_);
    resize(old.size() * 2);
    for (const Cell& cell : old)
      if (!(cell.value == EMPTY)) cells_[locate(cell.key)] = cell;
  }

  std::vector<Cell> cells_;
  uint32_t shift_ = 0;
  size_t used_ = 0;
};

}  // namespace sennit
