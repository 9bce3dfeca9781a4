// SPDX-License-Identifier: Apache-2.0
// The packets that are sent and not yet acknowledged. They are found by immediate and kept in order of sending.
//
// Records, a hash table over their immediates (unique among unacknowledged packets), and lists linked through the
// records. Both grow with use: most peers of a large group get few packets at a time. Every operation is O(1).
#pragma once
#include <cstdint>
#include <vector>

#include "flow/flow.hpp"
#include "flow/probe_table.hpp"

namespace sennit::flow {

inline constexpr uint32_t NO_RECORD = UINT32_MAX;

struct PacketRecord {
  DataOut packet;
  uint64_t sent_us;
  uint64_t order;   // number of the transmission on its path
  uint64_t serial;  // number of the transmission over all paths
  uint32_t previous, next;
  uint16_t path, moved_from;  // moved_from: the path a probe asks about, where the packet was before; else `path`
  uint8_t transmissions;
  bool lost;
};

struct RecordList {
  uint32_t head = NO_RECORD, tail = NO_RECORD;
  bool empty() const { return head == NO_RECORD; }
};

class Outstanding {
 public:
  explicit Outstanding(uint32_t capacity) : capacity_(capacity), by_immediate_(2 * FIRST_RECORDS) {}
  uint32_t size() const { return static_cast<uint32_t>(by_immediate_.size()); }
  bool full() const { return size() == capacity_; }
  PacketRecord& operator[](uint32_t id) { return records_[id]; }
  const PacketRecord& operator[](uint32_t id) const { return records_[id]; }

  uint32_t find(uint32_t immediate) const {
    const size_t at = by_immediate_.find(immediate);
    return at == by_immediate_.NONE ? NO_RECORD : by_immediate_.value_at(at);
  }
  // Not full. The record is in no list yet, and others may have moved.
  uint32_t insert(const DataOut& packet);
  void erase(uint32_t id);  // in no list any more
  void push_back(RecordList& list, uint32_t id);
  void unlink(RecordList& list, uint32_t id);
  void clear();

 private:
  static constexpr uint32_t FIRST_RECORDS = 16;

  void grow();

  const uint32_t capacity_;
  std::vector<PacketRecord> records_;
  ProbeTable<uint32_t, uint32_t, NO_RECORD> by_immediate_;  // record ids
  uint32_t free_ = NO_RECORD;
};

}  // namespace sennit::flow
