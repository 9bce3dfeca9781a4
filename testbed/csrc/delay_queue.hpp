// SPDX-License-Identifier: Apache-2.0
// Packets that wait for their time, the earliest first.
//
// Packets lie behind each other in chunks of memory, so that a short one takes little room and none is copied twice. A
// chunk is used again when its last packet has left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <queue>
#include <span>
#include <vector>

namespace sennit {

class DelayQueue {
 public:
  // Throws std::invalid_argument for a largest packet of 0 bytes or more than CHUNK_BYTES.
  explicit DelayQueue(size_t packet_max_bytes);

  static constexpr size_t CHUNK_BYTES = 1 << 20;

  // Room for the next packet, of the largest size. Valid until the next push or pop.
  std::span<std::byte> room();
  // Adds what was written to the beginning of room(). Packets of equal times leave in the order of their pushes.
  void push(uint64_t due_ns, size_t size_bytes);

  bool empty() const { return waiting_.empty(); }
  size_t size() const { return waiting_.size(); }
  // When the earliest packet is due. The queue must not be empty.
  uint64_t due_ns() const { return waiting_.top().due_ns; }
  std::span<const std::byte> front() const { return waiting_.top().bytes; }
  void pop();

  // Memory that is held, used or not.
  size_t chunks() const { return chunks_.size(); }

 private:
  struct Chunk {
    std::unique_ptr<std::byte[]> memory;
    size_t used_bytes = 0;
    size_t packets = 0;
  };
  struct Packet {
    uint64_t due_ns;
    uint64_t serial;
    std::span<const std::byte> bytes;
    Chunk* chunk;
  };
  struct Later {
    bool operator()(const Packet& left, const Packet& right) const {
      return left.due_ns != right.due_ns ? left.due_ns > right.due_ns : left.serial > right.serial;
    }
  };

  const size_t packet_max_bytes_;
  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<Chunk*> free_;
  Chunk* current_ = nullptr;
  uint64_t serial_ = 0;
  std::priority_queue<Packet, std::vector<Packet>, Later> waiting_;
};

}  // namespace sennit
