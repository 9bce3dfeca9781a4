// SPDX-License-Identifier: Apache-2.0
#include "flow/outstanding.hpp"

#include <algorithm>
#include <bit>

namespace sennit::flow {

Outstanding::Outstanding(uint32_t capacity) : records_(capacity) {
  // A quarter full at most: probes stay short.
  const uint32_t cells = std::bit_ceil(capacity * 4);
  cells_.resize(cells);
  shift_ = 32 - static_cast<uint32_t>(std::countr_zero(cells));
  clear();
}

void Outstanding::clear() {
  std::ranges::fill(cells_, NO_RECORD);
  free_ = NO_RECORD;
  size_ = 0;
  for (uint32_t id = static_cast<uint32_t>(records_.size()); id-- > 0;) {
    records_[id].next = free_;
    free_ = id;
  }
}

uint32_t Outstanding::find(uint32_t immediate) const {
  const auto mask = static_cast<uint32_t>(cells_.size() - 1);
  for (uint32_t cell = home(immediate); cells_[cell] != NO_RECORD; cell = (cell + 1) & mask)
    if (records_[cells_[cell]].packet.immediate == immediate) return cells_[cell];
  return NO_RECORD;
}

uint32_t Outstanding::insert(const DataOut& packet) {
  const uint32_t id = free_;
  free_ = records_[id].next;
  ++size_;
  records_[id] = Record{packet, 0, 0, 0, NO_RECORD, NO_RECORD, 0, 0, 0, false};
  const auto mask = static_cast<uint32_t>(cells_.size() - 1);
  uint32_t cell = home(packet.immediate);
  while (cells_[cell] != NO_RECORD) cell = (cell + 1) & mask;
  cells_[cell] = id;
  return id;
}

void Outstanding::erase(uint32_t id) {
  const auto mask = static_cast<uint32_t>(cells_.size() - 1);
  uint32_t hole = home(records_[id].packet.immediate);
  while (cells_[hole] != id) hole = (hole + 1) & mask;
  // Backward shift (Knuth, TAOCP 6.4, algorithm R): close the gap so that no probe ends early.
  for (uint32_t cell = (hole + 1) & mask; cells_[cell] != NO_RECORD; cell = (cell + 1) & mask) {
    const uint32_t wanted = home(records_[cells_[cell]].packet.immediate);
    if (((cell - wanted) & mask) < ((cell - hole) & mask)) continue;
    cells_[hole] = cells_[cell];
    hole = cell;
  }
  cells_[hole] = NO_RECORD;
  records_[id].next = free_;
  free_ = id;
  --size_;
}

void Outstanding::push_back(RecordList& list, uint32_t id) {
  Record& record = records_[id];
  record.previous = list.tail;
  record.next = NO_RECORD;
  if (list.tail != NO_RECORD)
    records_[list.tail].next = id;
  else
    list.head = id;
  list.tail = id;
}

void Outstanding::unlink(RecordList& list, uint32_t id) {
  const Record& record = records_[id];
  if (record.previous != NO_RECORD)
    records_[record.previous].next = record.next;
  else
    list.head = record.next;
  if (record.next != NO_RECORD)
    records_[record.next].previous = record.previous;
  else
    list.tail = record.previous;
}

}  // namespace sennit::flow
