// SPDX-License-Identifier: Apache-2.0
#include "delay_queue.hpp"

#include <stdexcept>
#include <string>

namespace sennit {

DelayQueue::DelayQueue(size_t packet_max_bytes) : packet_max_bytes_(packet_max_bytes) {
  if (packet_max_bytes == 0 || packet_max_bytes > CHUNK_BYTES)
    throw std::invalid_argument("packet_max_bytes " + std::to_string(packet_max_bytes) + "; allowed: 1.." +
                                std::to_string(CHUNK_BYTES));
}

std::span<std::byte> DelayQueue::room() {
  if (current_ == nullptr || current_->used_bytes + packet_max_bytes_ > CHUNK_BYTES) {
    if (free_.empty()) {
      chunks_.push_back(std::make_unique<Chunk>(Chunk{std::make_unique_for_overwrite<std::byte[]>(CHUNK_BYTES)}));
      free_.push_back(chunks_.back().get());
    }
    current_ = free_.back();
    free_.pop_back();
  }
  return {current_->memory.get() + current_->used_bytes, packet_max_bytes_};
}

void DelayQueue::push(uint64_t due_ns, size_t size_bytes) {
  const std::span<std::byte> at = room();
  waiting_.push(Packet{due_ns, serial_++, at.first(size_bytes), current_});
  current_->used_bytes += size_bytes;
  ++current_->packets;
}

void DelayQueue::pop() {
  Chunk* const chunk = waiting_.top().chunk;
  waiting_.pop();
  if (--chunk->packets != 0) return;
  chunk->used_bytes = 0;
  if (chunk != current_) free_.push_back(chunk);
}

}  // namespace sennit
