// SPDX-License-Identifier: Apache-2.0
#include "ports/shm/shm_lane.hpp"

#include <sched.h>
#include <time.h>
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
constexpr uint64_t BLOCK_MIN_BYTES = 4'096;  // a page

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
  // The port, or the peer's last word, will say that the peer is lost.
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

// The pages of the blocks come with the first message that needs them: most pairs of a large group never have one, or
// only small ones. Sizes double, so that a lane asks the kernel a few times at most.
bool ShmLane::reserve_blocks(uint64_t size_bytes) {
  const uint64_t needed_bytes = std::min(size_bytes, BULK_BLOCK_BYTES);
  if (needed_bytes <= reserved_bytes_) return true;
  const uint64_t each_bytes = std::min(std::bit_ceil(std::max(needed_bytes, BLOCK_MIN_BYTES)), BULK_BLOCK_BYTES);
  if (const int error = in_.reserve_blocks(each_bytes); error != 0) {
    failure_ = "no memory in /dev/shm for large messages of rank " + std::to_string(peer_) + ": " +
               std::generic_category().message(error);
    return false;
  }
  reserved_bytes_ = each_bytes;
  return true;
}

void ShmLane::grant(uint64_t receive_id, const MessageHeader& header, std::byte* destination) {
  if (!reserve_blocks(header.size_bytes)) return;
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
  // A peer that has ended writes no more than the ring holds. Another one must not keep this rank here.
  for (uint64_t left = CONTROL_RING_BYTES / LINE; left != 0 && consume(RECORDS_A_ROUND); --left) moved = true;
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
  // An exchange takes the cache line from the peer, so it is made only where a plain read has found blocks.
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

ShmLane::Debts ShmLane::debts() const {
  const auto owed = std::ranges::count_if(blocks_out_, [](const BlockOut& out) { return out.size_bytes != 0; });
  return {.receives = receives_.size() - free_slots_.size(),
          .sends = transfers_.size() + placements_.size() + references_.size() - free_references_.size() +
                   static_cast<size_t>(owed),
          .records = waiting_records_.size(),
          .loans = loans_out_,
          .waiting_loans = waiting_loans_.size()};
}

std::string ShmLane::describe() const {
  const Debts open = debts();
  return "shm to rank " + std::to_string(peer_) + ": " + std::to_string(open.receives) + " receives and " +
         std::to_string(open.sends) + " sends open, " + std::to_string(open.records) + " records waiting for room, " +
         std::to_string(open.loans) + " loans out, " + std::to_string(open.waiting_loans) + " more wanted" +
         (is_peer_heap_refused_ ? ", its shared heap cannot be mapped (another pid namespace?)" : "") +
         (peer_left_ ? ", peer left" : "");
}

// Direct transfers of a ShmLane: references to the sender's shared heap, and placements in the receiver's.

namespace {

// A peer that has a core finishes a piece much sooner. A peer that takes longer may be stopped.
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
  free_references_.clear();
}

}  // namespace sennit
