// SPDX-License-Identifier: Apache-2.0
// Direct transfers of a ShmLane: references to the sender's shared heap, and placements in the receiver's.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstring>

#include "ports/shm_lane.hpp"
#include "reduce/large_copy.hpp"

namespace sennit {
namespace {

// A peer that writes a piece and has its core is done much sooner. One that lost it may be stopped.
constexpr uint64_t WRITER_LIMIT_NS = 200'000'000;

constexpr const char* GAVE_HEAP_UP = "wrote to shared memory that this process had to give up";

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

void copy(std::byte* to, const std::byte* from, uint64_t piece_bytes, bool streams) {
  if (streams) {
    large_copy(CopySource::memory, to, from, piece_bytes);
  } else {
    std::memcpy(to, from, piece_bytes);
  }
}

}  // namespace

// Tells the peer where the heap of this process is.
void ShmLane::show_heap() {
  ShmSegmentHeader* const own = in_.segment;
  if (own == nullptr || own->has_heap.load(std::memory_order_relaxed) != 0) return;
  const std::optional<SharedHeapName> name = SharedHeap::name();
  if (!name) return;
  own->heap = *name;
  own->has_heap.store(1, std::memory_order_release);
}

bool ShmLane::maps_peers_heap() {
  if (peer_heap_ || is_peer_heap_refused_) return peer_heap_ != nullptr;
  const ShmSegmentHeader* const peer = out_.segment;
  if (peer == nullptr || peer->has_heap.load(std::memory_order_acquire) == 0) return false;
  const SharedHeapName name = peer->heap;  // the peer could change it between two looks
  peer_heap_ = PeerHeap::open(name);
  is_peer_heap_refused_ = !peer_heap_;
  return peer_heap_ != nullptr;
}

void ShmLane::transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes, Use use) {
  if (dead_ || memory_forgotten_) return;
  wake();
  const auto slot = static_cast<uint32_t>(advert_id);
  const uint64_t advert = advert_id >> 32;
  if (use == Use::round_trip && (advert & IS_LOAN) == 0) return lose("takes a message that it must send back");
  const auto* const bytes = static_cast<const std::byte*>(data);
  const bool is_in_heap = SharedHeap::contains(data, size_bytes);
  if (is_in_heap) show_heap();
  const bool may_stay_out = use != Use::copy || (advert & IS_LOAN) == 0;
  const bool may_refer = is_in_heap && (advert & READS_HEAP) != 0 && may_stay_out;
  std::byte* const place = (advert & HAS_PLACE) != 0 ? take_place(slot, size_bytes) : nullptr;
  if (place != nullptr && (!may_refer || size_bytes <= PLACED_MAX_BYTES)) {
    placements_.push_back({send_id, slot, bytes, place, size_bytes, 0});
  } else if (may_refer) {
    refer(send_id, slot, bytes, size_bytes, use == Use::round_trip);
  } else {
    transfers_.push_back({send_id, slot, bytes, size_bytes, 0, use == Use::round_trip});
  }
}

void ShmLane::refer(uint64_t send_id, uint32_t slot, const std::byte* data, uint64_t size_bytes, bool comes_back) {
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
  references_[record.number] = {send_id, comes_back ? const_cast<std::byte*>(data) : nullptr, size_bytes, true};
  publish_or_queue(record);
  ++counters_->references_sent;
  counters_->bytes_sent += size_bytes;
}

void ShmLane::take_back(const Record& record) {
  if (memory_forgotten_) return;
  if (record.flags == 0) {
    if (record.number >= references_.size() || !references_[record.number].is_out)
      return lose("gave back a reference that it does not have");
    const Reference reference = std::exchange(references_[record.number], {});
    free_references_.push_back(record.number);
    if (reference.written != nullptr && !SharedHeap::contains(reference.written, reference.size_bytes))
      return lose(GAVE_HEAP_UP);
    sink_.on_sent(reference.send_id);
    return;
  }
  if (record.block >= out_.bulk_blocks || blocks_out_[record.block].size_bytes == 0)
    return lose("gave back a block that it does not have");
  const BlockOut out = std::exchange(blocks_out_[record.block], {});
  std::memcpy(out.data, out_.bulk + record.block * BULK_BLOCK_BYTES, out.size_bytes);
  free_blocks_ |= 1u << record.block;
  sink_.on_sent(out.send_id);
}

// The peer first says that it takes its memory back and then looks whether we write. We say that we write and then look
// whether it takes it back. So at least one of the two sees the other.
bool ShmLane::begin_writing() {
  out_.header->is_writing.store(1, std::memory_order_seq_cst);
  if (!is_revoked_by_peer()) return true;
  end_writing();
  return false;
}

void ShmLane::end_writing() { out_.header->is_writing.store(0, std::memory_order_release); }

bool ShmLane::open(uint64_t loan_id) {
  if ((loan_id & REFERENCE_LOAN) == 0 || begin_writing()) return true;
  end_by_peer();
  return false;
}

void ShmLane::send_back(uint64_t loan_id) {
  wake();
  if ((loan_id & REFERENCE_LOAN) != 0) {
    end_writing();
    return_reference(static_cast<uint32_t>(loan_id));
    return;
  }
  Record record{};
  record.type = Record::returned;
  record.flags = 1;
  record.block = static_cast<uint32_t>(loan_id);
  lent_blocks_ &= ~(1u << record.block);
  publish_or_queue(record);
  --loans_out_;
  grant_waiting_loan();
}

// Whether the record has the whole message of an open receive.
bool ShmLane::fits_untouched(const Record& record) const {
  if (record.slot >= receives_.size()) return false;
  const Receive& receive = receives_[record.slot];
  return receive.is_open && receive.received_bytes == 0 && receive.size_bytes == record.header.size_bytes;
}

void ShmLane::take_reference(const Record& record) {
  const uint64_t size_bytes = record.header.size_bytes;
  const std::byte* const source = peer_heap_ ? peer_heap_->at(record.offset, size_bytes) : nullptr;
  if (source == nullptr || !fits_untouched(record)) {
    lose("referred to memory that fits no advertised receive");
    return;
  }
  ++counters_->references_received;
  counters_->bytes_received += size_bytes;
  if (memory_forgotten_) return;
  Receive& receive = receives_[record.slot];
  receive.is_open = false;  // to further records
  if (receive.destination != nullptr) {
    reads_.push_back({record.slot, record.number, source});
    return;
  }
  free_slots_.push_back(record.slot);
  --loans_out_;
  sink_.on_received(receive.receive_id, source, REFERENCE_LOAN | record.number);
  grant_waiting_loan();
}

bool ShmLane::read_piece() {
  const Read read = reads_.front();
  Receive& receive = receives_[read.slot];
  const uint64_t piece_bytes = std::min(DIRECT_PIECE_BYTES, receive.size_bytes - receive.received_bytes);
  std::byte* const destination = receive.destination + receive.received_bytes;
  const std::byte* const source = read.source + receive.received_bytes;
  copy(destination, source, piece_bytes, receive.size_bytes >= STREAM_FROM_BYTES);
  receive.received_bytes += piece_bytes;
  if (receive.received_bytes != receive.size_bytes) return true;
  reads_.pop_front();
  if (give_reference_back(read.number)) complete(read.slot);
  return true;
}

bool ShmLane::is_revoked_by_peer() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return in_.header->is_revoked.load(std::memory_order_acquire) != 0;
}

// The peer's own reason comes first, if it gave one.
void ShmLane::end_by_peer() {
  if (!dead_) look_for_last_word();
  if (!dead_) lose("ended the group while its memory was in use");
}

// False: the peer's memory was no longer the message when it was read.
bool ShmLane::give_reference_back(uint32_t number) {
  if (is_revoked_by_peer()) {
    end_by_peer();
    return false;
  }
  return_reference(number);
  return true;
}

void ShmLane::return_reference(uint32_t number) {
  Record record{};
  record.type = Record::returned;
  record.number = number;
  publish_or_queue(record);
}

// Where the peer wants the message, or null if this process cannot write there.
std::byte* ShmLane::take_place(uint32_t slot, uint64_t size_bytes) {
  const auto found = places_.find(slot);
  if (found == places_.end()) return nullptr;
  const uint64_t offset = found->second;
  places_.erase(found);
  return maps_peers_heap() ? peer_heap_->at(offset, size_bytes) : nullptr;
}

bool ShmLane::place_piece() {
  Placement& placement = placements_.front();
  const uint64_t piece_bytes = std::min(DIRECT_PIECE_BYTES, placement.size_bytes - placement.placed_bytes);
  if (!begin_writing()) {
    placements_.clear();
    end_by_peer();
    return true;
  }
  copy(placement.place + placement.placed_bytes, placement.data + placement.placed_bytes, piece_bytes,
       placement.size_bytes >= STREAM_FROM_BYTES);
  end_writing();
  placement.placed_bytes += piece_bytes;
  if (placement.placed_bytes != placement.size_bytes) return true;
  Record record{};
  record.type = Record::placed;
  record.slot = placement.slot;
  record.header.size_bytes = placement.size_bytes;
  publish_or_queue(record);
  ++counters_->placements_sent;
  counters_->bytes_sent += placement.size_bytes;
  const uint64_t send_id = placement.send_id;
  placements_.pop_front();
  sink_.on_sent(send_id);
  return true;
}

void ShmLane::take_placement(const Record& record) {
  if (!fits_untouched(record) || !receives_[record.slot].has_place) {
    lose("placed a message that fits no advertised receive");
    return;
  }
  ++counters_->placements_received;
  counters_->bytes_received += record.header.size_bytes;
  if (memory_forgotten_) return;
  // Another group of this process had to give the heap up: the bytes may be where nobody reads them.
  if (!SharedHeap::contains(receives_[record.slot].destination, record.header.size_bytes)) return lose(GAVE_HEAP_UP);
  complete(record.slot);
}

void ShmLane::take_memory_back() noexcept {
  reads_.clear();
  placements_.clear();
  blocks_out_ = {};
  out_.header->is_revoked.store(1, std::memory_order_seq_cst);
  // The owners of the memory use it after this fence. Pairs with the one in is_revoked_by_peer().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // The peer may be writing there now. If it is stopped or killed in the middle of a piece, it never says that it
  // ended. One that was killed writes no more: its memory goes before its locks.
  const uint64_t limit_ns = now_ns() + WRITER_LIMIT_NS;
  const auto writes = [&] { return in_.header->is_writing.load(std::memory_order_acquire) != 0 && out_.owner_alive(); };
  while (writes() && now_ns() < limit_ns) sched_yield();
  if (writes()) {
    for (const Receive& receive : receives_)
      if (receive.is_open && receive.has_place) SharedHeap::detach(receive.destination, receive.size_bytes);
    for (const Reference& reference : references_)
      if (reference.is_out && reference.written != nullptr) SharedHeap::detach(reference.written, reference.size_bytes);
  }
  references_.clear();
}

}  // namespace sennit
