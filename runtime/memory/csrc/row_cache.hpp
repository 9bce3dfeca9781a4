// SPDX-License-Identifier: Apache-2.0
// A set-associative cache of rows over a store, one batch at a time. docs/reference/embedding-store.md says exactly
// which row is evicted.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "rows.hpp"

namespace sennit::memory {

enum class Policy : std::uint8_t {
  LRU,  // evicts the row that has not been in a batch for longest
  LFU,  // evicts the row that was in the fewest batches since it was fetched, and old ones count less; ties as in LRU
};

class RowCache {
 public:
  static constexpr std::uint32_t WAYS = 32;
  // After so many evictions from a set LFU halves what its rows have counted (the "reset" of Einziger et al., TinyLFU,
  // 2017). Rows of the past would stay for ever else. A smaller number comes nearer to LRU: new rows are
  // kept sooner, and frequent ones are lost sooner.
  static constexpr std::uint32_t EVICTIONS_TO_HALVE = 8 * WAYS;

  // `lines` has set_count · WAYS + spare_count of them. Spare lines take rows whose set has no free line.
  RowCache(RowStore& store, Lines lines, std::uint64_t set_count, std::uint64_t spare_count, Policy policy);

  struct Pins {
    std::vector<std::uint64_t> lines;  // the line of each distinct row of the batch
    std::vector<std::uint64_t> begun;  // those whose rows were not read
  };

  // Raises StoreError for rows out of range, before anything else happens.
  static void check_rows(std::span<const std::int64_t> rows, std::uint64_t row_count);

  // Fetches and pins the rows of one batch: out[n] is the line of rows[n]. Rows may repeat. `begins`, rising: rows that
  // the batch gives new values to before anything reads them, so they are not read from the store, and their lines
  // hold anything. No other batch fetches them before. Raises StoreError, after which the cache can no longer be used,
  // but for NO_ROOM: then rows and pins are as they were.
  Pins fetch(std::span<const std::int64_t> rows, std::int64_t* out, std::span<const std::int64_t> begins = {});
  // Unpins the rows of a batch. `is_dirty`: the batch has changed them. If not, rows that were not read leave the
  // cache.
  void release(const Pins& pins, bool is_dirty);
  // Copies the current rows, each once, from the cache or the store: rows[n] to line n of `out`. Fetches and evicts
  // nothing.
  void read(std::span<const std::int64_t> rows, const Lines& out);
  // Writes changed rows to the store and makes them a generation.
  std::uint64_t flush(std::uint64_t tag);

  std::uint64_t set_of(std::uint64_t row) const;

  // Distinct rows per batch. Repetitions within a batch count as lookups only.
  struct Counters {
    std::uint64_t batches = 0, lookups = 0, hits = 0, misses = 0, conflicts = 0, evictions = 0, write_backs = 0;
    std::uint64_t begun = 0;  // of the misses, those whose rows were not read
  };
  // A batch that did not fit counts only what it has evicted.
  const Counters& counters() const { return counters_; }

 private:
  // A search of a set starts with `tags`: one byte of each row's hash.
  struct alignas(64) Set {
    std::array<std::uint8_t, WAYS> tags{};
    std::uint32_t used = 0, dirty = 0, evictions = 0;
    std::array<std::uint16_t, WAYS> pins{};
    std::array<std::uint32_t, WAYS> last_batch{}, batches{};
    std::array<std::uint64_t, WAYS> rows{};
  };
  struct Spare {
    std::uint64_t row = 0;
    std::uint32_t last_batch = 0;
    std::uint32_t pins = 0;
    bool is_dirty = false;
  };

  static constexpr std::uint32_t NO_WAY = ~0u;
  static constexpr std::uint64_t NO_LINE = ~0ull;

  std::uint32_t find(const Set& set, std::uint8_t tag, std::uint64_t row) const;
  std::uint32_t victim(const Set& set) const;
  std::uint64_t line_of(std::uint64_t row, std::uint64_t hash) const;
  std::uint64_t touch(std::uint64_t row, std::uint64_t hash, Pins& pins);
  std::uint64_t place(std::uint64_t row, std::uint64_t hash, Pins& pins, bool begins);
  void age(Set& set) const;
  void forget(const Pins& pins);
  std::uint64_t pinned() const;
  std::uint64_t spare_first() const { return sets_.size() * WAYS; }

  RowStore& store_;
  Lines lines_;
  Policy policy_;
  std::vector<Set> sets_;
  std::vector<Spare> spares_;
  std::vector<std::uint64_t> free_spares_;
  std::unordered_map<std::uint64_t, std::uint64_t> spare_of_row_;
  std::uint32_t batch_ = 0;
  std::vector<RowAt> written_, placed_, wanted_;
  std::vector<std::uint32_t> missed_;
  Counters counters_;
};

}  // namespace sennit::memory
