// SPDX-License-Identifier: Apache-2.0
// The checks of a datagram, and the ring of batches that records go into. docs/reference/records.md specifies them. The
// checks come in the order of offload/admission.py.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "record_decoder.hpp"

namespace sennit::offload {

// The numbers of offload/admission.py. Only BPF programs return `busy`.
enum class Verdict : std::uint8_t {
  accepted,
  truncated,
  foreign,
  wrong_version,
  wrong_schema,
  wrong_session,
  oversized,
  malformed,
  duplicate,
  out_of_sequence,
  no_credit,
  busy,
  corrupt,
};
constexpr std::size_t VERDICTS = 13;

struct FeedCounters {
  std::array<std::uint64_t, VERDICTS> datagrams{};
  std::uint64_t records = 0;   // in accepted datagrams
  std::uint64_t filtered = 0;  // of these, dropped by the plan's filters
  std::uint64_t body_bytes = 0;
};

struct Session {
  std::uint32_t schema_id;
  std::uint32_t id;
};

// All functions are thread-safe. Writer and readers of a batch synchronise by one atomic word per slot: rows that
// `rows_taken` has reported are complete.
class Receiver {
 public:
  using Datagram = std::span<const std::uint8_t>;

  // `slots` is a power of two. Throws std::system_error if the address space cannot hold all batches.
  Receiver(const RecordSchema& schema, const RowFilters& filters, Session session, std::uint32_t batch_rows,
           std::uint32_t slots);
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  void take(std::span<const Datagram> datagrams);

  std::uint32_t rows_taken(std::uint32_t batch) const;
  // The highest row received out of sequence since the last accepted datagram; 0: none.
  std::uint32_t row_ahead(std::uint32_t batch) const;
  void release(std::uint32_t batch);
  FeedCounters counters() const;

  // The content of a batch's slot. The slot cannot be released while this exists.
  struct Content {
    std::unique_lock<std::mutex> reading;
    std::uint32_t batch;  // that the slot takes
    std::size_t rows;
    const float* labels;
    std::vector<Column> columns;  // wanted fields, in the schema's order
  };
  Content content(std::uint32_t batch) const;

 private:
  // Address space only: pages are allocated when written. Lists are rarely as long as they may be.
  class Memory {
   public:
    explicit Memory(std::size_t size_bytes);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    std::uint8_t* data() const { return data_; }

   private:
    std::size_t size_bytes_;
    std::uint8_t* data_;
  };

  struct BatchSlot {
    // batch << 32 | row, in one word, so that nobody reads the row of one batch with the number of another.
    std::atomic<std::uint64_t> next_row{0};
    std::atomic<std::uint64_t> row_ahead{0};
    Filled filled;
    mutable std::mutex reading;
  };

  Verdict judge(Datagram datagram);
  Verdict append(BatchSlot& slot, std::uint8_t* memory, Datagram body, std::uint32_t batch, std::uint32_t row,
                 std::uint32_t records);
  BatchSlot& slot_of(std::uint32_t batch) const { return slots_[batch & (slot_count_ - 1)]; }

  const Session session_;
  const std::uint32_t batch_rows_;
  const std::uint32_t slot_count_;
  const RecordDecoder decoder_;
  const std::size_t slot_bytes_;
  const Memory memory_;
  mutable std::mutex filling_;  // guards everything below except the atomics
  std::unique_ptr<BatchSlot[]> slots_;
  Filled next_;  // kept to reuse its memory
  FeedCounters counters_;
};

}  // namespace sennit::offload
