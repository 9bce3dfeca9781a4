// SPDX-License-Identifier: Apache-2.0
// The packets that are sent and not yet acknowledged: found by immediate, kept in order of sending.
//
// A fixed slab of records, a hash index over their immediates (unique among unacknowledged packets), and
// lists threaded through the records. Nothing allocates after construction; every operation is O(1).
#pragma once
#include <cstdint>
#include <vector>

#include "flow/flow.hpp"

namespace sennit::flow {

inline constexpr uint32_t NO_RECORD = UINT32_MAX;

struct Record {
  DataOut packet;
  uint64_t sent_us;
  uint64_t order;   // running number of the transmission on its path
  uint64_t serial;  // and over all paths
  uint32_t previous, next;
  uint16_t path, moved_from;  // moved_from: by a probe, which asks what became of this path; else the same
  uint8_t transmissions;
  bool lost;
};

struct RecordList {
  uint32_t head = NO_RECORD, tail = NO_RECORD;
  bool empty() const { return head == NO_RECORD; }
};

class Outstanding {
 public:
  explicit Outstanding(uint32_t capacity);
  uint32_t size() const { return size_; }
  bool full() const { return free_ == NO_RECORD; }
  Record& operator[](uint32_t id) { return records_[id]; }
  const Record& operator[](uint32_t id) const { return records_[id]; }

  uint32_t find(uint32_t immediate) const;
  uint32_t insert(const DataOut& packet);  // not full, and in no list yet
  void erase(uint32_t id);                 // in no list any more
  void push_back(RecordList& list, uint32_t id);
  void unlink(RecordList& list, uint32_t id);
  void clear();

 private:
  uint32_t home(uint32_t immediate) const { return (immediate * 0x9E37'79B1u) >> shift_; }
  std::vector<Record> records_;
  std::vector<uint32_t> cells_;  // record id or NO_RECORD; linear probing
  uint32_t shift_, free_ = NO_RECORD, size_ = 0;
};

}  // namespace sennit::flow
