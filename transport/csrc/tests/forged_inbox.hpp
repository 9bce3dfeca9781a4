// SPDX-License-Identifier: Apache-2.0
// An inbox in plain memory whose producer is the test.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "ports/shm/shm_segment.hpp"

namespace sennit::test {

class ForgedInbox {
 public:
  enum Type : uint32_t { EAGER = 2, ADVERT = 3, FRAGMENT = 4, REFERENCE = 6, RETURNED = 7, PLACED = 8 };
  static constexpr uint32_t BLOCKS = 3;
  ForgedInbox() : memory_(sizeof(ShmInboxHeader) + CONTROL_RING_BYTES + BLOCKS * BULK_BLOCK_BYTES + 64) {
    auto* base = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory_.data()) + 63) / 64 * 64);
    inbox.header = reinterpret_cast<ShmInboxHeader*>(base);
    inbox.control = base + sizeof(ShmInboxHeader);
    inbox.bulk = inbox.control + CONTROL_RING_BYTES;
    inbox.bulk_blocks = BLOCKS;
  }
  struct Record {  // as in shm_lane.hpp
    uint32_t type, flags;
    uint64_t total_bytes;
    MessageHeader header;
    uint32_t slot = 0, size_bytes = 0, block = 0, number = 0;
    uint64_t offset = 0;
  };
  static_assert(sizeof(Record) == 64);
  void write(const Record& record) {
    std::memcpy(inbox.control + inbox.header->control_head % CONTROL_RING_BYTES, &record, sizeof record);
    inbox.header->control_head += record.total_bytes;
  }
  ShmInbox inbox;

 private:
  std::vector<std::byte> memory_;
};

}  // namespace sennit::test
