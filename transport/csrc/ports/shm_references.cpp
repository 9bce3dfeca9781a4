// SPDX-License-Identifier: Apache-2.0
// References of a ShmLane: transfers whose bytes stay in the sender's shared heap until the receiver has read them.
#include <algorithm>
#include <cstring>

#include "ports/shm_lane.hpp"
#include "reduce/stream_copy.hpp"

namespace sennit {
namespace {

// What is copied in one round, so that all peers take turns.
constexpr uint64_t PIECE_BYTES = 262'144;

}  // namespace

// Tells the peer where the heap of this process is. Adverts of the peer show that it has seen it.
void ShmLane::show_heap() {
  ShmSegmentHeader* const own = in_.segment;
  if (own == nullptr || own->has_heap.load(std::memory_order_relaxed) != 0) return;
  const std::optional<SharedHeapName> name = SharedHeap::name();
  if (!name) return;
  own->heap = *name;
  own->has_heap.store(1, std::memory_order_release);
}

bool ShmLane::reads_peers_heap() {
  if (peer_heap_ || is_peer_heap_refused_) return peer_heap_ != nullptr;
  const ShmSegmentHeader* const peer = out_.segment;
  if (peer == nullptr || peer->has_heap.load(std::memory_order_acquire) == 0) return false;
  peer_heap_ = PeerHeap::open(peer->heap);
  is_peer_heap_refused_ = !peer_heap_;
  return peer_heap_ != nullptr;
}

void ShmLane::refer(uint64_t send_id, uint32_t slot, const std::byte* data, uint64_t size_bytes) {
  Record record{};
  record.type = Record::reference;
  record.slot = slot;
  record.header.size_bytes = size_bytes;
  record.offset = SharedHeap::offset_of(data);
  if (free_references_.empty()) {
    record.number = static_cast<uint32_t>(references_.size());
    references_.emplace_back();
  } else {
    record.number = free_references_.back();
    free_references_.pop_back();
  }
  references_[record.number] = {send_id, true};
  publish_or_queue(record);
  ++counters_->references_sent;
  counters_->bytes_sent += size_bytes;
}

void ShmLane::take_reference_back(uint32_t number) {
  if (memory_forgotten_) return;
  if (number >= references_.size() || !references_[number].is_out) {
    lose("gave back a reference that it does not have");
    return;
  }
  references_[number].is_out = false;
  free_references_.push_back(number);
  sink_.on_sent(references_[number].send_id);
}

void ShmLane::take_reference(const Record& record) {
  const uint64_t size_bytes = record.header.size_bytes;
  const std::byte* const source = peer_heap_ ? peer_heap_->at(record.offset, size_bytes) : nullptr;
  if (source == nullptr || record.slot >= receives_.size() || !receives_[record.slot].is_open ||
      receives_[record.slot].received_bytes != 0 || receives_[record.slot].size_bytes != size_bytes) {
    lose("referred to memory that fits no advertised receive");
    return;
  }
  ++counters_->references_received;
  counters_->bytes_received += size_bytes;
  if (memory_forgotten_) return;
  Receive& receive = receives_[record.slot];
  if (receive.destination != nullptr) {
    receive.is_open = false;  // to further records
    reads_.push_back({record.slot, record.number, source});
    return;
  }
  receive.is_open = false;
  free_slots_.push_back(record.slot);
  --loans_out_;
  sink_.on_received(receive.receive_id, source, REFERENCE_LOAN | record.number);
  grant_waiting_loan();
}

bool ShmLane::read_piece() {
  const Read read = reads_.front();
  Receive& receive = receives_[read.slot];
  const uint64_t piece_bytes = std::min(PIECE_BYTES, receive.size_bytes - receive.received_bytes);
  std::byte* const destination = receive.destination + receive.received_bytes;
  const std::byte* const source = read.source + receive.received_bytes;
  if (receive.size_bytes >= STREAM_FROM_BYTES) {
    stream_copy(destination, source, piece_bytes);
  } else {
    std::memcpy(destination, source, piece_bytes);
  }
  receive.received_bytes += piece_bytes;
  if (receive.received_bytes != receive.size_bytes) return true;
  reads_.pop_front();
  if (give_reference_back(read.number)) complete(read.slot);
  return true;
}

bool ShmLane::is_revoked_by_peer() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return in_.header->is_revoked.load(std::memory_order_relaxed) != 0;
}

// False: the peer's memory was no longer the message when it was read.
bool ShmLane::give_reference_back(uint32_t number) {
  if (is_revoked_by_peer()) {
    if (!dead_) look_for_last_word();
    if (!dead_) lose("ended the group before its message was read");
    return false;
  }
  Record record{};
  record.type = Record::returned;
  record.number = number;
  publish_or_queue(record);
  return true;
}

}  // namespace sennit
