// SPDX-License-Identifier: Apache-2.0
#include "receiver.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "checksum.hpp"
#include "tracepoints.hpp"

namespace sennit::offload {
namespace {

constexpr std::uint16_t MAGIC = 0x5e17;
constexpr std::uint8_t VERSION = 2;
constexpr std::size_t PAGE_BYTES = 4096;

std::uint16_t read16(const std::uint8_t* from) { return static_cast<std::uint16_t>(from[0] << 8 | from[1]); }
std::uint32_t read32(const std::uint8_t* from) { return std::uint32_t{read16(from)} << 16 | read16(from + 2); }
std::uint64_t read64(const std::uint8_t* from) { return std::uint64_t{read32(from)} << 32 | read32(from + 4); }

constexpr std::uint64_t state(std::uint32_t batch, std::uint32_t row) { return std::uint64_t{batch} << 32 | row; }
constexpr std::uint32_t batch_of(std::uint64_t state) { return static_cast<std::uint32_t>(state >> 32); }
constexpr std::uint32_t row_of(std::uint64_t state) { return static_cast<std::uint32_t>(state); }

}  // namespace

Receiver::Memory::Memory(std::size_t size_bytes) : size_bytes_(size_bytes) {
  void* found = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(),
                            "cpu: no " + std::to_string(size_bytes) +
                                " bytes of address space for the batches (fewer rows, slots or lists in the plan)");
  data_ = static_cast<std::uint8_t*>(found);
}

Receiver::Memory::~Memory() { munmap(data_, size_bytes_); }

Receiver::Receiver(const RecordSchema& schema, const RowFilters& filters, Session session, std::uint32_t batch_rows,
                   std::uint32_t slots)
    : session_(session),
      batch_rows_(batch_rows),
      slot_count_(slots),
      decoder_(schema, filters, batch_rows),
      slot_bytes_((decoder_.columns_bytes() + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES),
      memory_(slot_bytes_ * std::max<std::size_t>(slots, 1)) {
  if (!std::has_single_bit(slots)) throw std::invalid_argument(std::to_string(slots) + " slots; not a power of two");
  slots_ = std::make_unique<BatchSlot[]>(slots);
  next_ = decoder_.nothing();
  for (std::uint32_t n = 0; n < slots; n++) {
    slots_[n].next_row = slots_[n].row_ahead = state(n, 0);
    slots_[n].filled = decoder_.nothing();
  }
}

void Receiver::take(std::span<const Datagram> datagrams) {
  const std::lock_guard lock(filling_);
  for (const Datagram& datagram : datagrams) {
    const Verdict verdict = judge(datagram);
    counters_.datagrams[static_cast<std::size_t>(verdict)]++;
    if (verdict != Verdict::accepted)
      trace::datagram_refused(session_.id, static_cast<std::uint32_t>(verdict), datagram.data(), datagram.size());
  }
}

Verdict Receiver::judge(Datagram datagram) {
  if (datagram.size() < HEADER_BYTES) return Verdict::truncated;
  const std::uint8_t* header = datagram.data();
  if (read16(header) != MAGIC) return Verdict::foreign;
  if (header[2] != VERSION) return Verdict::wrong_version;
  if (read32(header + 4) != session_.schema_id) return Verdict::wrong_schema;
  if (read32(header + 8) != session_.id) return Verdict::wrong_session;
  const std::uint32_t batch = read32(header + 12), row = read32(header + 16), records = read16(header + 20);
  const std::size_t stated_bytes = HEADER_BYTES + read16(header + 22);
  if (stated_bytes > datagram.size()) return Verdict::truncated;
  if (stated_bytes < datagram.size()) return Verdict::oversized;
  if (read64(header + CHECKSUM_AT) != checksum_of(datagram)) return Verdict::corrupt;
  if (header[3] != 0 || records == 0 || row >= batch_rows_ || records > batch_rows_ - row) return Verdict::malformed;

  BatchSlot& slot = slot_of(batch);
  const std::uint64_t open = slot.next_row.load(std::memory_order_relaxed);
  // Batch numbers wrap at 2^32.
  if (const auto ahead = static_cast<std::int32_t>(batch - batch_of(open)); ahead != 0)
    return ahead < 0 ? Verdict::duplicate : Verdict::no_credit;
  if (row < row_of(open)) return Verdict::duplicate;
  if (row > row_of(open)) {
    const std::uint64_t highest = std::max(slot.row_ahead.load(std::memory_order_relaxed), state(batch, row));
    slot.row_ahead.store(highest, std::memory_order_release);
    return Verdict::out_of_sequence;
  }
  std::uint8_t* memory = memory_.data() + slot_bytes_ * (batch & (slot_count_ - 1));
  return append(slot, memory, datagram.subspan(HEADER_BYTES), batch, row, records);
}

Verdict Receiver::append(BatchSlot& slot, std::uint8_t* memory, Datagram body, std::uint32_t batch, std::uint32_t row,
                         std::uint32_t records) {
  next_ = slot.filled;
  if (!decoder_.append(body, records, state(batch, row), memory, next_)) return Verdict::malformed;
  counters_.records += records;
  counters_.filtered += records - (next_.rows - slot.filled.rows);
  counters_.body_bytes += body.size();
  std::swap(slot.filled, next_);
  slot.row_ahead.store(state(batch, 0), std::memory_order_relaxed);
  // Stored after the columns, so a reader that sees this row may read them.
  slot.next_row.store(state(batch, row + records), std::memory_order_release);
  return Verdict::accepted;
}

std::uint32_t Receiver::rows_taken(std::uint32_t batch) const {
  const std::uint64_t found = slot_of(batch).next_row.load(std::memory_order_acquire);
  return batch_of(found) == batch ? row_of(found) : 0;
}

std::uint32_t Receiver::row_ahead(std::uint32_t batch) const {
  const std::uint64_t found = slot_of(batch).row_ahead.load(std::memory_order_acquire);
  return batch_of(found) == batch ? row_of(found) : 0;
}

void Receiver::release(std::uint32_t batch) {
  BatchSlot& slot = slot_of(batch);
  const std::scoped_lock lock(slot.reading, filling_);
  slot.filled = decoder_.nothing();
  slot.row_ahead.store(state(batch + slot_count_, 0), std::memory_order_relaxed);
  slot.next_row.store(state(batch + slot_count_, 0), std::memory_order_release);
}

FeedCounters Receiver::counters() const {
  const std::lock_guard lock(filling_);
  return counters_;
}

Receiver::Content Receiver::content(std::uint32_t batch) const {
  const BatchSlot& slot = slot_of(batch);
  std::unique_lock reading(slot.reading);
  const std::lock_guard lock(filling_);
  const std::uint8_t* memory = memory_.data() + slot_bytes_ * (batch & (slot_count_ - 1));
  return {std::move(reading), batch_of(slot.next_row.load(std::memory_order_relaxed)), slot.filled.rows,
          decoder_.labels(memory), decoder_.columns(memory, slot.filled)};
}

}  // namespace sennit::offload
