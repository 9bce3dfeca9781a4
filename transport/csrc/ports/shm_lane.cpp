// SPDX-License-Identifier: Apache-2.0
#include "ports/shm_lane.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <system_error>
#include <utility>

#include "reduce/large_copy.hpp"
#include "wire/utf8.hpp"

namespace sennit {
namespace {

constexpr uint64_t LINE = 64;

uint64_t lines(uint64_t size_bytes) { return (size_bytes + LINE - 1) / LINE * LINE; }

}  // namespace

ShmLane::ShmLane(uint32_t peer, ShmInbox in, ShmInbox out, LaneSink& sink, CounterPage* counter_page,
                 uint64_t peer_timeout_us, flow::Agenda* agenda, uint32_t member)
    : peer_(peer),
      in_(in),
      out_(out),
      sink_(sink),
      free_blocks_((1u << out.bulk_blocks) - 1),
      silence_(peer_timeout_us),
      counters_(counter_page, peer),
      agenda_(agenda),
      member_(member) {
  static_assert(sizeof(Record) == LINE);
}

uint64_t ShmLane::eager_max_bytes() const { return SHM_EAGER_MAX_BYTES; }

uint64_t ShmLane::data_bytes_of(const Record& eager) {
  return eager.flags == EAGER_REQUEST ? 0 : eager.header.size_bytes;
}

bool ShmLane::send_eager(const MessageHeader& header, uint32_t flags, const void* data) {
  // It waits for the port or the peer's last word to say that the peer is lost.
  if (is_ending()) return false;
  wake();
  if (!waiting_records_.empty()) return false;
  Record record{};
  record.type = Record::eager;
  record.flags = flags;
  record.header = header;
  const uint64_t data_bytes = data_bytes_of(record);
  if (!publish(record, data, data_bytes)) return false;
  ++counters_->eager_sent;
  counters_->bytes_sent += data_bytes;
  return true;
}

bool ShmLane::publish(const Record& record, const void* data, uint64_t data_bytes) {
  const uint64_t total = LINE + lines(data_bytes);
  const uint64_t offset = control_head_ % CONTROL_RING_BYTES;
  const uint64_t to_end = CONTROL_RING_BYTES - offset;
  const uint64_t skipped = to_end < total ? to_end : 0;
  if (control_head_ + skipped + total - control_tail_seen_ > CONTROL_RING_BYTES) {
    control_tail_seen_ = out_.header->control_tail.load(std::memory_order_acquire);
    if (control_head_ + skipped + total - control_tail_seen_ > CONTROL_RING_BYTES) {
      ++counters_->ring_full;
      return false;
    }
  }
  if (skipped != 0) {
    Record filler{};
    filler.type = Record::skip;
    filler.total_bytes = skipped;
    std::memcpy(out_.control + offset, &filler, sizeof filler);
    control_head_ += skipped;
  }
  std::byte* at = out_.control + control_head_ % CONTROL_RING_BYTES;
  Record written = record;
  written.total_bytes = total;
  std::memcpy(at, &written, sizeof written);
  if (data_bytes != 0) std::memcpy(at + LINE, data, data_bytes);
  control_head_ += total;
  out_.header->control_head.store(control_head_, std::memory_order_release);
  dirty_ = true;
  return true;
}

void ShmLane::publish_or_queue(const Record& record) {
  if (!waiting_records_.empty() || !publish(record, nullptr, 0)) waiting_records_.push_back(record);
}

void ShmLane::advertise(uint64_t receive_id, const MessageHeader& header, void* destination) {
  if (dead_ || memory_forgotten_) return;
  wake();
  if (destination == nullptr && (!waiting_loans_.empty() || loans_out_ + 1 >= in_.bulk_blocks)) {
    waiting_loans_.push_back({receive_id, header});
    return;
  }
  grant(receive_id, header, static_cast<std::byte*>(destination));
}

// The pages of the blocks come with the first message that needs them: most pairs of a large group never have one.
bool ShmLane::reserve_blocks() {
  if (are_blocks_reserved_) return true;
  const int error = in_.reserve_blocks();
  are_blocks_reserved_ = error == 0;
  if (error != 0)
    failure_ = "no memory in /dev/shm for large messages of rank " + std::to_string(peer_) + ": " +
               std::generic_category().message(error);
  return are_blocks_reserved_;
}

void ShmLane::grant(uint64_t receive_id, const MessageHeader& header, std::byte* destination) {
  if (!reserve_blocks()) return;
  if (destination == nullptr) ++loans_out_;
  uint32_t slot;
  if (free_slots_.empty()) {
    slot = static_cast<uint32_t>(receives_.size());
    receives_.emplace_back();
  } else {
    slot = free_slots_.back();
    free_slots_.pop_back();
  }
  const bool has_place = destination != nullptr && SharedHeap::contains(destination, header.size_bytes);
  receives_[slot] = {receive_id, destination, header.size_bytes, 0, true, has_place};
  Record record{};
  record.type = Record::advert;
  record.header = header;
  record.slot = slot;
  if (maps_peers_heap()) record.flags |= READS_HEAP;
  if (destination == nullptr) record.flags |= IS_LOAN;
  if (has_place) {
    show_heap();
    record.flags |= HAS_PLACE;
    record.offset = SharedHeap::offset_of(destination);
  }
  publish_or_queue(record);
}

void ShmLane::grant_waiting_loan() {
  if (waiting_loans_.empty() || dead_) return;
  const WaitingLoan next = waiting_loans_.front();
  waiting_loans_.pop_front();
  grant(next.receive_id, next.header, nullptr);
}

bool ShmLane::progress(uint64_t now_us) {
  bool moved = consume(RECORDS_A_ROUND);
  if (moved) silence_.on_heard(now_us);
  while (!waiting_records_.empty() && publish(waiting_records_.front(), nullptr, 0)) {
    waiting_records_.pop_front();
    moved = true;
  }
  if (!transfers_.empty() && waiting_records_.empty()) moved |= push_fragment();
  if (!placements_.empty()) moved |= place_piece();
  if (!reads_.empty()) moved |= read_piece();
  return moved;
}

bool ShmLane::has_news() const {
  return !dead_ && (in_.header->control_head.load(std::memory_order_acquire) != control_tail_ ||
                    in_.header->last_word_bytes.load(std::memory_order_acquire) != 0);
}

bool ShmLane::drain() {
  bool moved = false;
  while (consume(RECORDS_A_ROUND)) moved = true;
  return moved;
}

bool ShmLane::consume(uint32_t record_limit) {
  const uint64_t head = in_.header->control_head.load(std::memory_order_acquire);
  if (head == control_tail_ || dead_) return false;
  bool moved = false;
  for (uint32_t count = 0; control_tail_ != head && count < record_limit; ++count) {
    const std::byte* at = in_.control + control_tail_ % CONTROL_RING_BYTES;
    Record record;
    std::memcpy(&record, at, sizeof record);
    const uint64_t to_end = CONTROL_RING_BYTES - control_tail_ % CONTROL_RING_BYTES;
    if (record.total_bytes < LINE || record.total_bytes % LINE != 0 || record.total_bytes > to_end) {
      lose("wrote a malformed record into shared memory");
      return true;
    }
    bool fragment_taken = false;
    switch (record.type) {
      case Record::skip:
        break;
      case Record::eager:
        if ((record.flags != EAGER_DATA && record.flags != EAGER_REQUEST) ||
            data_bytes_of(record) > record.total_bytes - LINE) {
          lose("wrote a malformed eager message into shared memory");
          return true;
        }
        if (!sink_.on_eager(peer_, record.header, record.flags, at + LINE)) return moved;
        ++counters_->eager_received;
        counters_->bytes_received += data_bytes_of(record);
        break;
      case Record::advert:
        if ((record.flags & HAS_PLACE) != 0) places_[record.slot] = record.offset;
        sink_.on_advert(peer_, record.header, record.slot | uint64_t{record.flags} << 32);
        break;
      case Record::reference:
        take_reference(record);
        break;
      case Record::placed:
        take_placement(record);
        break;
      case Record::returned:
        take_back(record);
        fragment_taken = record.flags != 0;
        break;
      case Record::fragment:
        take_fragment(record);
        fragment_taken = true;
        break;
      case Record::goodbye:
        peer_left_ = true;
        break;
      default:
        lose("wrote an unknown record into shared memory");
        return true;
    }
    if (dead_) return true;
    control_tail_ += record.total_bytes;
    in_.header->control_tail.store(control_tail_, std::memory_order_release);
    dirty_ = true;
    moved = true;
    if (fragment_taken) break;  // one copy a round
  }
  return moved;
}

bool ShmLane::fits(const Record& fragment) const {
  if (fragment.slot >= receives_.size() || fragment.block >= in_.bulk_blocks ||
      fragment.size_bytes > BULK_BLOCK_BYTES || (lent_blocks_ >> fragment.block & 1) != 0)
    return false;
  const Receive& receive = receives_[fragment.slot];
  if (!receive.is_open) return false;
  const uint64_t left_bytes = receive.size_bytes - receive.received_bytes;
  // A loan comes in one piece.
  return receive.destination == nullptr ? fragment.size_bytes == left_bytes : fragment.size_bytes <= left_bytes;
}

void ShmLane::take_fragment(const Record& record) {
  if (!fits(record)) {
    lose("described a fragment that fits no advertised receive");
    return;
  }
  Receive& receive = receives_[record.slot];
  const std::byte* source = in_.bulk + record.block * BULK_BLOCK_BYTES;
  ++counters_->fragments_received;
  counters_->bytes_received += record.size_bytes;
  if (memory_forgotten_) {
    give_back(record.block);
    return;
  }
  if (receive.destination == nullptr) {
    const uint64_t receive_id = receive.receive_id;
    receive.is_open = false;
    free_slots_.push_back(record.slot);
    lent_blocks_ |= 1u << record.block;
    sink_.on_received(receive_id, source, record.block);
    return;
  }
  std::byte* destination = receive.destination + receive.received_bytes;
  if (receive.size_bytes >= STREAM_FROM_BYTES) {
    large_copy(CopySource::cache, destination, source, record.size_bytes);
  } else {
    std::memcpy(destination, source, record.size_bytes);
  }
  receive.received_bytes += record.size_bytes;
  give_back(record.block);
  if (receive.received_bytes == receive.size_bytes) complete(record.slot);
}

void ShmLane::complete(uint32_t slot) {
  const Receive whole = receives_[slot];
  receives_[slot].is_open = false;
  free_slots_.push_back(slot);
  sink_.on_received(whole.receive_id, whole.destination, 0);
}

bool ShmLane::find_free_block() {
  // An exchange takes the cache line from the peer, so it must be worth it.
  if (free_blocks_ == 0 && out_.header->blocks_back.load(std::memory_order_relaxed) != 0) {
    const uint32_t back = out_.header->blocks_back.exchange(0, std::memory_order_acquire);
    free_blocks_ = back & ((1u << out_.bulk_blocks) - 1);
  }
  return free_blocks_ != 0;
}

void ShmLane::give_back(uint32_t block) {
  in_.header->blocks_back.fetch_or(1u << block, std::memory_order_release);
  dirty_ = true;
}

bool ShmLane::release(uint64_t loan_id) {
  wake();
  if ((loan_id & REFERENCE_LOAN) != 0) return give_reference_back(static_cast<uint32_t>(loan_id));
  const auto block = static_cast<uint32_t>(loan_id);
  lent_blocks_ &= ~(1u << block);
  give_back(block);
  --loans_out_;
  grant_waiting_loan();
  return true;
}

bool ShmLane::push_fragment() {
  if (peer_left_) return false;  // nobody reads it
  Transfer& transfer = transfers_.front();
  const uint64_t size_bytes = std::min(BULK_BLOCK_BYTES, transfer.size_bytes - transfer.sent_bytes);
  if (!find_free_block()) {
    ++counters_->ring_full;
    return false;
  }
  // There must be room for the record first, because the copy must not be made twice.
  if (control_head_ + 2 * LINE - control_tail_seen_ > CONTROL_RING_BYTES) {
    control_tail_seen_ = out_.header->control_tail.load(std::memory_order_acquire);
    if (control_head_ + 2 * LINE - control_tail_seen_ > CONTROL_RING_BYTES) return false;
  }
  const auto block = static_cast<uint32_t>(std::countr_zero(free_blocks_));
  free_blocks_ &= ~(1u << block);
  if (blocks_out_[block].size_bytes != 0) {
    lose("gave back a block without the result that it owes");
    return true;
  }
  std::memcpy(out_.bulk + block * BULK_BLOCK_BYTES, transfer.data + transfer.sent_bytes, size_bytes);
  Record record{};
  record.type = Record::fragment;
  record.slot = transfer.slot;
  record.size_bytes = static_cast<uint32_t>(size_bytes);
  record.block = block;
  publish_or_queue(record);
  transfer.sent_bytes += size_bytes;
  ++counters_->fragments_sent;
  counters_->bytes_sent += size_bytes;
  if (transfer.sent_bytes == transfer.size_bytes) {
    const Transfer whole = transfer;
    transfers_.pop_front();
    if (whole.comes_back) {
      blocks_out_[block] = {whole.send_id, const_cast<std::byte*>(whole.data), whole.size_bytes};
    } else {
      sink_.on_sent(whole.send_id);
    }
  }
  return true;
}

void ShmLane::forget_user_memory() noexcept {
  end_writing();  // a reduction may have begun, and not ended
  if (std::exchange(memory_forgotten_, true)) return;
  transfers_.clear();
  waiting_loans_.clear();
  take_memory_back();
}

void ShmLane::say_goodbye() {
  if (dead_) return;
  wake();
  Record record{};
  record.type = Record::goodbye;
  publish_or_queue(record);
}

void ShmLane::say_last_word(std::string_view reason) {
  if (!dead_ && !peer_left_ && out_.header->last_word_bytes.load(std::memory_order_relaxed) == 0) {
    wake();
    const std::string_view word = utf8_prefix(reason, LAST_WORD_MAX_BYTES);
    std::memcpy(out_.header->last_word, word.data(), word.size());
    out_.header->last_word_bytes.store(static_cast<uint32_t>(word.size()), std::memory_order_release);
    dirty_ = true;
  }
  // After the reason, so that a peer that reads or writes this memory now finds it.
  forget_user_memory();
}

void ShmLane::look_for_last_word() {
  const uint32_t size_bytes = in_.header->last_word_bytes.load(std::memory_order_acquire);
  if (dead_ || size_bytes == 0) return;
  dead_ = true;
  forget_user_memory();
  const std::string_view word(in_.header->last_word, std::min<size_t>(size_bytes, LAST_WORD_MAX_BYTES));
  sink_.on_peer_aborted(peer_, repaired_utf8(word));
}

bool ShmLane::take_dirty() { return std::exchange(dirty_, false); }

void ShmLane::lose(std::string reason) {
  dead_ = true;
  forget_user_memory();
  sink_.on_peer_lost(peer_, std::move(reason));
}

// Beats come without being asked for, so the questions of Silence are not sent.
void ShmLane::expect(uint64_t now_us) {
  expected_us_ = now_us;
  const uint32_t beats = out_.segment->beats.load(std::memory_order_relaxed);
  if (std::exchange(beats_seen_, beats) != beats) silence_.on_heard(now_us);
  if (dead_ || silence_.look(now_us) != flow::Silence::Step::give_up) return;
  lose("gave no sign of life for " + flow::Silence::seconds(silence_.silent_us()) +
       " (SENNIT_PEER_TIMEOUT_S): its process is there, but not one thread of it has run");
}

std::string ShmLane::describe() const {
  return "shm to rank " + std::to_string(peer_) + ": " + std::to_string(transfers_.size()) + " transfers and " +
         std::to_string(waiting_records_.size()) + " records waiting for room, " + std::to_string(loans_out_) +
         " loans out" + (is_peer_heap_refused_ ? ", its shared heap cannot be mapped (another pid namespace?)" : "") +
         (peer_left_ ? ", peer left" : "");
}

}  // namespace sennit
