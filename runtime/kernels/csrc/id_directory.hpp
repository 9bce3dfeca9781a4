// SPDX-License-Identifier: Apache-2.0
// Which row of a dynamic table has which id (docs/decisions/0074-ids-are-numbered-by-their-owner.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "huge_pages.hpp"
#include "job.hpp"

namespace sennit::kernels {

// What is known of a row. 16 bytes, so that a hit reads and writes one cache line. Python sees int64 [rows, 2].
struct DirectoryEntry {
  std::int64_t id;
  std::uint32_t last;   // the number of the last training batch that had the id; 0: the row is free
  std::uint32_t count;  // how often it was looked up for training since it was admitted, up to 2^32 - 1
};
static_assert(sizeof(DirectoryEntry) == 16);

enum class Eviction : std::uint8_t {
  LRU,  // the rows that have not been in a training batch for longest
  LFU,  // the rows that were looked up least since they were admitted; ties as in LRU
};

// 64-bit ids, each with a row of its own. Open addressing with linear probing (Knuth, TAOCP 3, 6.4, algorithms L and
// R): a byte of the hash for each place, compared 16 at a time, and the row that has the id. Places are 5/4 of the
// rows, so at most 0.8 of them are in use, and 6.25 bytes a row are needed beside the entry.
//
// Which rows ids get is a function of the calls alone: free rows are taken from the lowest.
class IdDirectory {
 public:
  // `entries`: memory for all rows, which the caller keeps. Rows in use are those whose `last` is not 0. Throws
  // std::invalid_argument if two of them have one id.
  explicit IdDirectory(std::span<DirectoryEntry> entries);

  std::size_t used() const { return used_; }
  std::size_t free() const { return entries_.size() - used_; }
  // What it needs beside the entries.
  std::size_t size_bytes() const { return tags_.size() + rows_.size() * sizeof rows_[0] + free_rows_.capacity() * 4; }

  // rows[n] is the row of ids[n], or -1. With `step`, a training batch: counts, and dates the rows that it finds.
  // `once`: a row counts once in a step, however often it is found. `before`: gets what rows had before, for `undo`;
  // may be null. Returns how many are not there.
  std::size_t find(std::span<const std::int64_t> ids, std::int64_t* rows, std::uint32_t step = 0, bool once = false,
                   std::uint64_t* before = nullptr);

  // Takes back what `find` counted and dated. `rows`, `before`: its results.
  void undo(std::span<const std::int64_t> rows, const std::uint64_t* before);

  // Gives rows to ids that have none, which are distinct, in their order. `counts`: how often each was looked up.
  // The caller has checked that there are as many free rows.
  void admit(std::span<const std::int64_t> ids, const std::uint32_t* counts, std::uint32_t step, std::int64_t* rows);

  // The `count` rows to give up first, rising, but none whose `last` is `step` or later. Fewer if there are no more.
  // Ties of `last`, or of `count` and `last`, are broken by the id. `keys`: a number for each row in place of `policy`,
  // and the lowest go first.
  std::vector<std::int64_t> victims(std::size_t count, Eviction policy, std::uint32_t step,
                                    const double* keys = nullptr) const;

  // Frees rows that are in use.
  void evict(std::span<const std::int64_t> rows);

 private:
  static constexpr std::size_t WINDOW = 16;

  std::size_t home(std::uint64_t hash) const;
  std::size_t next(std::size_t place) const { return place + 1 == places_ ? 0 : place + 1; }
  void set_tag(std::size_t place, std::uint8_t tag);
  std::size_t place_of(std::int64_t id, std::uint64_t hash) const;
  void insert(std::int64_t id, std::uint32_t row);
  void erase(std::size_t place);

  std::span<DirectoryEntry> entries_;
  std::size_t places_, used_ = 0;
  // 0: empty. The first WINDOW - 1 come again at the end, so that windows do not wrap.
  std::vector<std::uint8_t, HugePages<std::uint8_t>> tags_;
  std::vector<std::uint32_t, HugePages<std::uint32_t>> rows_;
  std::size_t never_used_ = 0;            // rows from here on have never been in use
  std::vector<std::uint32_t> free_rows_;  // others that are free, falling
};

// The row shard that has an id: a hash, so that ids of any pattern are spread over all shards.
std::uint32_t shard_of_id(std::int64_t id, std::uint32_t shards);

// Deals ids to shards as `split_rows` does (ids.hpp), by hash, and leaves them as they are. False if lengths do not
// count the ids.
bool split_ids(std::span<const std::int64_t> values, const Integers& lengths, std::size_t bags, std::uint32_t shards,
               std::int32_t* lengths_of_shards, std::int64_t* values_of_shards);

// The distinct ids, rising, with how often each is there. Returns how many there are.
std::size_t counted_ids(std::span<const std::int64_t> values, std::int64_t* ids, std::uint32_t* counts);

// Initial rows [ids, columns], uniform in [-bound, bound): a function of seed, table, id and column alone.
// Philox4x32-10 with key `seed` and the counter (id low, id high, column / 4, table); word (column mod 4) is of the
// column.
void initial_rows(std::span<const std::int64_t> ids, std::size_t first_column, std::size_t columns, std::uint64_t seed,
                  std::uint32_t table, float bound, float* rows);

}  // namespace sennit::kernels
