// SPDX-License-Identifier: Apache-2.0
#include "row_cache.hpp"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <string>
#include <unordered_set>

#include "store_error.hpp"

namespace sennit::memory {
namespace {

// Rows of look-ahead when prefetching their sets.
constexpr std::size_t LOOKAHEAD = 16;

// MurmurHash3's 64-bit finaliser (Appleby 2011).
std::uint64_t hash_of(std::uint64_t row) {
  row = (row ^ (row >> 33)) * 0xFF51AFD7ED558CCD;
  row = (row ^ (row >> 33)) * 0xC4CEB9FE1A85EC53;
  return row ^ (row >> 33);
}

// The high bits choose the set (Lemire 2019), the low bits are the tag.
std::uint64_t index_of(std::uint64_t hash, std::uint64_t set_count) {
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(hash) * set_count) >> 64);
}

std::uint32_t equal_tags(const std::array<std::uint8_t, RowCache::WAYS>& tags, std::uint8_t tag) {
#ifdef __SSE2__
  const __m128i wanted = _mm_set1_epi8(static_cast<char>(tag));
  const auto* at = reinterpret_cast<const __m128i*>(tags.data());
  const auto low = static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_load_si128(at), wanted)));
  const auto high = static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_load_si128(at + 1), wanted)));
  return low | high << 16;
#else
  std::uint32_t found = 0;
  for (std::uint32_t way = 0; way < RowCache::WAYS; way++) found |= std::uint32_t{tags[way] == tag} << way;
  return found;
#endif
}

}  // namespace

RowCache::RowCache(RowStore& store, Lines lines, std::uint64_t set_count, std::uint64_t spare_count, Policy policy)
    : store_(store), lines_(std::move(lines)), policy_(policy), sets_(set_count), spares_(spare_count) {
  for (std::uint64_t n = spare_count; n > 0; n--) free_spares_.push_back(n - 1);
}

std::uint64_t RowCache::set_of(std::uint64_t row) const { return index_of(hash_of(row), sets_.size()); }

std::uint32_t RowCache::find(const Set& set, std::uint8_t tag, std::uint64_t row) const {
  for (std::uint32_t found = equal_tags(set.tags, tag) & set.used; found != 0; found &= found - 1) {
    const auto way = static_cast<std::uint32_t>(std::countr_zero(found));
    if (set.rows[way] == row) return way;
  }
  return NO_WAY;
}

// The way for a new row: the lowest empty one, else the policy's choice, the lowest among equals. None if all are
// pinned.
std::uint32_t RowCache::victim(const Set& set) const {
  if (set.used != ~0u) return static_cast<std::uint32_t>(std::countr_one(set.used));
  std::uint32_t best = NO_WAY;
  std::uint64_t best_rank = ~0ull;
  for (std::uint32_t way = 0; way < WAYS; way++) {
    if (set.pins[way] != 0) continue;
    const std::uint64_t rank =
        policy_ == Policy::LRU ? set.last_batch[way] : std::uint64_t{set.batches[way]} << 32 | set.last_batch[way];
    if (rank < best_rank) {
      best = way;
      best_rank = rank;
    }
  }
  return best;
}

// The line of a cached row, pinned once for this batch; NO_LINE if the row is not cached.
std::uint64_t RowCache::touch(std::uint64_t row, std::uint64_t hash, Pins& pins) {
  const std::uint64_t index = index_of(hash, sets_.size());
  Set& set = sets_[index];
  if (const std::uint32_t way = find(set, static_cast<std::uint8_t>(hash), row); way != NO_WAY) {
    const std::uint64_t line = index * WAYS + way;
    if (set.last_batch[way] != batch_) {
      set.last_batch[way] = batch_;
      set.batches[way]++;
      set.pins[way]++;
      pins.lines.push_back(line);
    }
    return line;
  }
  if (spare_of_row_.empty()) return NO_LINE;
  const auto found = spare_of_row_.find(row);
  if (found == spare_of_row_.end()) return NO_LINE;
  Spare& spare = spares_[found->second];
  const std::uint64_t line = spare_first() + found->second;
  if (spare.last_batch != batch_) {
    spare.last_batch = batch_;
    spare.pins++;
    pins.lines.push_back(line);
  }
  return line;
}

// Finds a line for a row that is not cached; NO_LINE if there is none. `begins`: it is not read.
std::uint64_t RowCache::place(std::uint64_t row, std::uint64_t hash, Pins& pins, bool begins) {
  const std::uint64_t index = index_of(hash, sets_.size());
  Set& set = sets_[index];
  std::uint64_t line = 0;
  if (const std::uint32_t way = victim(set); way != NO_WAY) {
    line = index * WAYS + way;
    const std::uint32_t bit = 1u << way;
    if ((set.used & bit) != 0) {
      counters_.evictions++;
      if (++set.evictions % EVICTIONS_TO_HALVE == 0) age(set);
      if ((set.dirty & bit) != 0) written_.push_back({set.rows[way], line});
    }
    set.used |= bit;
    set.dirty &= ~bit;
    set.tags[way] = static_cast<std::uint8_t>(hash);
    set.rows[way] = row;
    set.pins[way] = 1;
    set.last_batch[way] = batch_;
    set.batches[way] = 1;
  } else {
    if (free_spares_.empty()) return NO_LINE;
    counters_.conflicts++;
    const std::uint64_t number = free_spares_.back();
    free_spares_.pop_back();
    spares_[number] = {row, batch_, 1, false};
    spare_of_row_[row] = number;
    line = spare_first() + number;
  }
  counters_.misses++;
  pins.lines.push_back(line);
  placed_.push_back({row, line});
  if (begins) {
    counters_.begun++;
    pins.begun.push_back(line);
  } else {
    wanted_.push_back({row, line});
  }
  return line;
}

void RowCache::age(Set& set) const {
  for (std::uint32_t& batches : set.batches) batches /= 2;
}

// Gives back what a batch has taken whose rows will not be read. Lines of its new rows become empty. What they held is
// still in them, and is written back if it was changed.
void RowCache::forget(const Pins& pins) {
  counters_.write_backs += written_.size();
  if (!written_.empty()) store_.exchange(written_, {}, lines_);
  for (const std::uint64_t line : pins.lines) {
    if (line < spare_first())
      sets_[line / WAYS].pins[line % WAYS]--;
    else
      spares_[line - spare_first()].pins--;
  }
  // Backwards, so that spare lines are taken again in the same order.
  for (auto placed = placed_.rbegin(); placed != placed_.rend(); ++placed) {
    if (placed->line < spare_first()) {
      sets_[placed->line / WAYS].used &= ~(1u << placed->line % WAYS);
      continue;
    }
    spare_of_row_.erase(placed->row);
    free_spares_.push_back(placed->line - spare_first());
  }
}

// Lines that batches hold.
std::uint64_t RowCache::pinned() const {
  std::uint64_t found = spares_.size() - free_spares_.size();
  for (const Set& set : sets_)
    for (const std::uint16_t pins : set.pins) found += pins != 0;
  return found;
}

void RowCache::check_rows(std::span<const std::int64_t> rows, std::uint64_t row_count) {
  for (std::size_t n = 0; n < rows.size(); n++)
    if (static_cast<std::uint64_t>(rows[n]) >= row_count)
      throw StoreError(Fault::ARGUMENT, "row " + std::to_string(rows[n]) + " at position " + std::to_string(n) +
                                            "; allowed: 0 to " + std::to_string(row_count) + ", that excluded");
}

RowCache::Pins RowCache::fetch(std::span<const std::int64_t> rows, std::int64_t* out,
                               std::span<const std::int64_t> begins) {
  Pins pins;
  const Counters before = counters_;
  batch_++;
  counters_.batches++;
  counters_.lookups += rows.size();
  written_.clear();
  placed_.clear();
  wanted_.clear();
  missed_.clear();
  // Cached rows come first, so that no row of the batch is evicted for another one.
  std::array<std::uint64_t, LOOKAHEAD> hashes{};
  const auto hash_ahead = [&](std::size_t n) {
    if (n >= rows.size()) return;
    const std::uint64_t hash = hash_of(static_cast<std::uint64_t>(rows[n]));
    hashes[n % LOOKAHEAD] = hash;
    const Set* set = &sets_[index_of(hash, sets_.size())];
    __builtin_prefetch(set);
    __builtin_prefetch(&set->rows);
  };
  for (std::size_t n = 0; n < LOOKAHEAD; n++) hash_ahead(n);
  for (std::size_t n = 0; n < rows.size(); n++) {
    const std::uint64_t hash = hashes[n % LOOKAHEAD];
    hash_ahead(n + LOOKAHEAD);
    const std::uint64_t line = touch(static_cast<std::uint64_t>(rows[n]), hash, pins);
    if (line == NO_LINE)
      missed_.push_back(static_cast<std::uint32_t>(n));
    else
      out[n] = static_cast<std::int64_t>(line);
  }
  counters_.hits += pins.lines.size();
  for (const std::uint32_t n : missed_) {
    const auto row = static_cast<std::uint64_t>(rows[n]);
    const std::uint64_t hash = hash_of(row);
    std::uint64_t line = touch(row, hash, pins);
    if (line == NO_LINE) line = place(row, hash, pins, std::ranges::binary_search(begins, rows[n]));
    if (line == NO_LINE) {
      forget(pins);
      const std::uint64_t evictions = counters_.evictions, write_backs = counters_.write_backs;
      counters_ = before;
      counters_.evictions = evictions;
      counters_.write_backs = write_backs;
      const std::unordered_set<std::int64_t> distinct(rows.begin(), rows.end());
      throw StoreError(Fault::NO_ROOM, "a batch needs " + std::to_string(distinct.size()) +
                                           " rows, other batches hold " + std::to_string(pinned()) +
                                           "; the cache has " + std::to_string(spare_first()) + " lines in sets of " +
                                           std::to_string(WAYS) + " and " + std::to_string(spares_.size()) +
                                           " spare ones; give the cache more lines, or fetch smaller batches");
    }
    out[n] = static_cast<std::int64_t>(line);
  }
  counters_.write_backs += written_.size();
  store_.exchange(written_, wanted_, lines_);
  return pins;
}

void RowCache::release(const Pins& pins, bool is_dirty) {
  written_.clear();
  for (const std::uint64_t line : pins.lines) {
    if (line < spare_first()) {
      Set& set = sets_[line / WAYS];
      set.pins[line % WAYS]--;
      if (is_dirty) set.dirty |= 1u << line % WAYS;
      continue;
    }
    const std::uint64_t number = line - spare_first();
    Spare& spare = spares_[number];
    spare.is_dirty |= is_dirty;
    if (--spare.pins > 0) continue;
    if (spare.is_dirty) written_.push_back({spare.row, line});
    spare_of_row_.erase(spare.row);
    free_spares_.push_back(number);
  }
  // What was not read was not written either: the store has these rows.
  if (!is_dirty)
    for (const std::uint64_t line : pins.begun) {
      if (line >= spare_first()) continue;
      Set& set = sets_[line / WAYS];
      const std::uint32_t bit = 1u << line % WAYS;
      if (set.pins[line % WAYS] == 0 && (set.dirty & bit) == 0) set.used &= ~bit;
    }
  counters_.write_backs += written_.size();
  if (!written_.empty()) store_.exchange(written_, {}, lines_);
}

// The line of a row, or NO_LINE if it is not cached.
std::uint64_t RowCache::line_of(std::uint64_t row, std::uint64_t hash) const {
  const std::uint64_t index = index_of(hash, sets_.size());
  if (const std::uint32_t way = find(sets_[index], static_cast<std::uint8_t>(hash), row); way != NO_WAY)
    return index * WAYS + way;
  const auto found = spare_of_row_.find(row);
  return found == spare_of_row_.end() ? NO_LINE : spare_first() + found->second;
}

void RowCache::read(std::span<const std::int64_t> rows, const Lines& out) {
  wanted_.clear();
  for (std::size_t n = 0; n < rows.size(); n++) {
    const auto row = static_cast<std::uint64_t>(rows[n]);
    const std::uint64_t line = line_of(row, hash_of(row));
    if (line == NO_LINE)
      wanted_.push_back({row, n});
    else
      out.copy(n, lines_, line);
  }
  store_.exchange({}, wanted_, out);
}

std::uint64_t RowCache::flush(std::uint64_t tag) {
  written_.clear();
  for (std::size_t index = 0; index < sets_.size(); index++) {
    Set& set = sets_[index];
    for (std::uint32_t dirty = set.dirty; dirty != 0; dirty &= dirty - 1) {
      const auto way = static_cast<std::uint32_t>(std::countr_zero(dirty));
      written_.push_back({set.rows[way], index * WAYS + way});
    }
    set.dirty = 0;
  }
  for (const auto& [row, number] : spare_of_row_) {
    if (spares_[number].is_dirty) written_.push_back({row, spare_first() + number});
    spares_[number].is_dirty = false;
  }
  counters_.write_backs += written_.size();
  store_.exchange(written_, {}, lines_);
  return store_.flush(tag);
}

}  // namespace sennit::memory
