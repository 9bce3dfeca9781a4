// SPDX-License-Identifier: Apache-2.0
#include "flow/outstanding.hpp"

#include <algorithm>

namespace sennit::flow {

void Outstanding::clear() {
  by_immediate_.clear();
  free_ = NO_RECORD;
  for (uint32_t id = static_cast<uint32_t>(records_.size()); id-- > 0;) {
    records_[id].next = free_;
    free_ = id;
  }
}

void Outstanding::grow() {
  const auto count = static_cast<uint32_t>(records_.size());
  records_.resize(std::min(std::max(2 * count, FIRST_RECORDS), capacity_));
  for (uint32_t id = static_cast<uint32_t>(records_.size()); id-- > count;) {
    records_[id].next = free_;
    free_ = id;
  }
}

uint32_t Outstanding::insert(const DataOut& packet) {
  if (free_ == NO_RECORD) grow();
  const uint32_t id = free_;
  free_ = records_[id].next;
  records_[id] = PacketRecord{packet, 0, 0, 0, NO_RECORD, NO_RECORD, 0, 0, 0, false};
  by_immediate_[packet.immediate] = id;
  return id;
}

void Outstanding::erase(uint32_t id) {
  by_immediate_.erase_at(by_immediate_.find(records_[id].packet.immediate));
  records_[id].next = free_;
  free_ = id;
}

void Outstanding::push_back(RecordList& list, uint32_t id) {
  PacketRecord& record = records_[id];
  record.previous = list.tail;
  record.next = NO_RECORD;
  if (list.tail != NO_RECORD)
    records_[list.tail].next = id;
  else
    list.head = id;
  list.tail = id;
}

void Outstanding::unlink(RecordList& list, uint32_t id) {
  const PacketRecord& record = records_[id];
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
