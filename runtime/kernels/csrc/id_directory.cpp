// SPDX-License-Identifier: Apache-2.0
#include "id_directory.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <tuple>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace sennit::kernels {

namespace {

// Ids between one step of a search and the next: enough for their cache misses to overlap. A power of 2.
constexpr std::size_t AHEAD = 16;
constexpr std::uint32_t NO_ROW = ~0u;

// The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): each bit of x changes half of the result's.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Of ids in one shard, the hash that chooses shards has equal high bits, so places have another one.
std::uint64_t place_hash(std::int64_t id) { return mix(static_cast<std::uint64_t>(id) + 0x9e3779b97f4a7c15u); }

std::uint64_t scaled(std::uint64_t hash, std::uint64_t count) {
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(hash) * count >> 64);
}

// Not 0. The low bits, since the high ones say the place.
std::uint8_t tag_of(std::uint64_t hash) { return static_cast<std::uint8_t>(1 + (hash & 0xffff) % 255); }

struct Found {
  std::uint32_t equal, empty;  // a bit for each place of a window
};

Found compare(const std::uint8_t* tags, std::uint8_t tag) {
#if defined(__SSE2__)
  const __m128i window = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tags));
  const auto bits = [](__m128i mask) { return static_cast<std::uint32_t>(_mm_movemask_epi8(mask)); };
  return {bits(_mm_cmpeq_epi8(window, _mm_set1_epi8(static_cast<char>(tag)))),
          bits(_mm_cmpeq_epi8(window, _mm_setzero_si128()))};
#else
  Found found{};
  for (std::uint32_t n = 0; n < 16; n++) {
    found.equal |= static_cast<std::uint32_t>(tags[n] == tag) << n;
    found.empty |= static_cast<std::uint32_t>(tags[n] == 0) << n;
  }
  return found;
#endif
}

}  // namespace

IdDirectory::IdDirectory(std::span<DirectoryEntry> entries) : entries_(entries) {
  if (entries.size() > std::numeric_limits<std::uint32_t>::max()) throw std::invalid_argument("more than 2^32 rows");
  places_ = std::max(WINDOW, entries.size() + (entries.size() + 3) / 4);
  tags_.resize(places_ + WINDOW - 1);
  rows_.resize(places_);
  for (std::size_t row = 0; row < entries.size(); row++) {
    if (entries[row].last == 0) continue;
    if (place_of(entries[row].id, place_hash(entries[row].id)) != places_)
      throw std::invalid_argument("id " + std::to_string(entries[row].id) + " has two rows");
    insert(entries[row].id, static_cast<std::uint32_t>(row));
    never_used_ = row + 1;
  }
  for (std::size_t row = never_used_; row-- > 0;)
    if (entries[row].last == 0) free_rows_.push_back(static_cast<std::uint32_t>(row));
}

std::size_t IdDirectory::home(std::uint64_t hash) const { return scaled(hash, places_); }

void IdDirectory::set_tag(std::size_t place, std::uint8_t tag) {
  tags_[place] = tag;
  if (place < WINDOW - 1) tags_[places_ + place] = tag;
}

// `places_` if the id is not there.
std::size_t IdDirectory::place_of(std::int64_t id, std::uint64_t hash) const {
  const std::uint8_t tag = tag_of(hash);
  for (std::size_t place = home(hash);;) {
    Found found = compare(&tags_[place], tag);
    // A search ends at the first empty place. There is one: a fifth of the places are empty.
    if (found.empty != 0) found.equal &= (found.empty & -found.empty) - 1;
    for (; found.equal != 0; found.equal &= found.equal - 1) {
      std::size_t at = place + static_cast<std::size_t>(std::countr_zero(found.equal));
      if (at >= places_) at -= places_;
      if (entries_[rows_[at]].id == id) return at;
    }
    if (found.empty != 0) return places_;
    place += WINDOW;
    if (place >= places_) place -= places_;
  }
}

void IdDirectory::insert(std::int64_t id, std::uint32_t row) {
  const std::uint64_t hash = place_hash(id);
  std::size_t place = home(hash);
  while (tags_[place] != 0) place = next(place);
  set_tag(place, tag_of(hash));
  rows_[place] = row;
  used_++;
}

// Moves those behind the place up, so that no search meets a gap before its id.
void IdDirectory::erase(std::size_t place) {
  for (std::size_t other = next(place); tags_[other] != 0; other = next(other)) {
    const std::size_t wanted = home(place_hash(entries_[rows_[other]].id));
    // Whether it would be found at `place`: its home is not behind it.
    const std::size_t from_home = other >= wanted ? other - wanted : other + places_ - wanted;
    const std::size_t moved = other >= place ? other - place : other + places_ - place;
    if (from_home < moved) continue;
    set_tag(place, tags_[other]);
    rows_[place] = rows_[other];
    place = other;
  }
  set_tag(place, 0);
  used_--;
}

std::size_t IdDirectory::find(std::span<const std::int64_t> ids, std::int64_t* rows, std::uint32_t step, bool once,
                              std::uint64_t* before) {
  // An id is in one of three steps: its place is fetched, then its entry, and then it is there.
  constexpr std::size_t RING = 2 * AHEAD;
  std::array<std::uint64_t, RING> hashes;
  std::array<std::uint32_t, RING> likely;
  std::size_t missing = 0;
  for (std::size_t n = 0; n < ids.size() + 2 * AHEAD; n++) {
    if (n >= 2 * AHEAD) {
      const std::size_t at = n - 2 * AHEAD;
      std::uint32_t row = likely[at % RING];
      if (row == NO_ROW || entries_[row].id != ids[at]) {
        const std::size_t place = place_of(ids[at], hashes[at % RING]);
        row = place == places_ ? NO_ROW : rows_[place];
      }
      rows[at] = row == NO_ROW ? -1 : static_cast<std::int64_t>(row);
      missing += row == NO_ROW;
      if (row != NO_ROW && step != 0) {
        DirectoryEntry& entry = entries_[row];
        if (before != nullptr) before[at] = std::uint64_t{entry.count} << 32 | entry.last;
        entry.count += entry.count != std::numeric_limits<std::uint32_t>::max() && !(once && entry.last == step);
        entry.last = step;
      }
    }
    if (n >= AHEAD && n - AHEAD < ids.size()) {
      // The first place with the tag has the id nearly always.
      const std::size_t slot = (n - AHEAD) % RING, place = home(hashes[slot]);
      const std::uint32_t equal = compare(&tags_[place], tag_of(hashes[slot])).equal;
      std::size_t at = place + (equal == 0 ? 0 : static_cast<std::size_t>(std::countr_zero(equal)));
      if (at >= places_) at -= places_;
      likely[slot] = equal == 0 ? NO_ROW : rows_[at];
      if (equal != 0) __builtin_prefetch(&entries_[likely[slot]], 1);
    }
    if (n < ids.size()) {
      const std::uint64_t hash = hashes[n % RING] = place_hash(ids[n]);
      const std::size_t place = home(hash);
      __builtin_prefetch(&tags_[place]);
      __builtin_prefetch(&rows_[place]);
    }
  }
  return missing;
}

void IdDirectory::undo(std::span<const std::int64_t> rows, const std::uint64_t* before) {
  // From the end, since a row may be there several times.
  for (std::size_t n = rows.size(); n-- > 0;) {
    if (rows[n] < 0) continue;
    DirectoryEntry& entry = entries_[static_cast<std::size_t>(rows[n])];
    entry.count = static_cast<std::uint32_t>(before[n] >> 32);
    entry.last = static_cast<std::uint32_t>(before[n]);
  }
}

void IdDirectory::admit(std::span<const std::int64_t> ids, const std::uint32_t* counts, std::uint32_t step,
                        std::int64_t* rows) {
  for (std::size_t n = 0; n < ids.size(); n++) {
    std::size_t row = never_used_;
    if (free_rows_.empty()) {
      never_used_++;
    } else {
      row = free_rows_.back();
      free_rows_.pop_back();
    }
    entries_[row] = {ids[n], step, counts[n]};
    insert(ids[n], static_cast<std::uint32_t>(row));
    rows[n] = static_cast<std::int64_t>(row);
  }
}

std::vector<std::int64_t> IdDirectory::victims(std::size_t count, Eviction policy, std::uint32_t step,
                                               const double* keys) const {
  using Candidate = std::tuple<double, std::uint32_t, std::int64_t, std::uint32_t>;  // key, last, id, row
  std::vector<Candidate> candidates;
  candidates.reserve(used_);
  for (std::size_t row = 0; row < never_used_; row++) {
    const DirectoryEntry& entry = entries_[row];
    if (entry.last == 0 || entry.last >= step) continue;
    const double key = keys != nullptr ? keys[row] : policy == Eviction::LFU ? entry.count : 0.0;
    candidates.emplace_back(key, entry.last, entry.id, static_cast<std::uint32_t>(row));
  }
  count = std::min(count, candidates.size());
  if (count < candidates.size())
    std::nth_element(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(count), candidates.end());
  std::vector<std::int64_t> rows(count);
  for (std::size_t n = 0; n < count; n++) rows[n] = std::get<3>(candidates[n]);
  std::ranges::sort(rows);
  return rows;
}

void IdDirectory::evict(std::span<const std::int64_t> rows) {
  for (const std::int64_t row : rows) {
    DirectoryEntry& entry = entries_[static_cast<std::size_t>(row)];
    if (entry.last == 0) throw std::invalid_argument("row " + std::to_string(row) + " is free");
    erase(place_of(entry.id, place_hash(entry.id)));
    entry = {};
    free_rows_.push_back(static_cast<std::uint32_t>(row));
  }
  std::ranges::sort(free_rows_, std::greater{});
}

std::uint32_t shard_of_id(std::int64_t id, std::uint32_t shards) {
  return static_cast<std::uint32_t>(scaled(mix(static_cast<std::uint64_t>(id)), shards));
}

bool split_ids(std::span<const std::int64_t> values, const Integers& lengths, std::size_t bags, std::uint32_t shards,
               std::int32_t* lengths_of_shards, std::int64_t* values_of_shards) {
  std::fill_n(lengths_of_shards, shards * bags, 0);
  std::vector<std::uint32_t> shard_of(values.size());
  std::vector<std::size_t> next(shards + 1);
  std::size_t at = 0;
  for (std::size_t bag = 0; bag < bags; bag++) {
    // As an unsigned number, a negative length is too large as well.
    const auto length = static_cast<std::uint64_t>(lengths[bag]);
    if (length > values.size() - at) return false;
    for (const std::size_t end = at + length; at < end; at++) {
      const std::uint32_t shard = shard_of[at] = shard_of_id(values[at], shards);
      lengths_of_shards[shard * bags + bag]++;
      next[shard + 1]++;
    }
  }
  if (at != values.size()) return false;
  std::partial_sum(next.begin(), next.end(), next.begin());
  for (std::size_t n = 0; n < at; n++) values_of_shards[next[shard_of[n]]++] = values[n];
  return true;
}

std::size_t counted_ids(std::span<const std::int64_t> values, std::int64_t* ids, std::uint32_t* counts) {
  std::copy(values.begin(), values.end(), ids);
  std::sort(ids, ids + values.size());
  std::size_t found = 0;
  for (std::size_t n = 0; n < values.size(); n++) {
    const std::int64_t id = ids[n];
    if (found == 0 || ids[found - 1] != id) {
      ids[found] = id;
      counts[found++] = 0;
    }
    counts[found - 1]++;
  }
  return found;
}

void initial_rows(std::span<const std::int64_t> ids, std::size_t first_column, std::size_t columns, std::uint64_t seed,
                  std::uint32_t table, float bound, float* rows) {
  const auto philox = [&](std::uint64_t id, std::uint32_t group) {
    std::array<std::uint32_t, 4> c{static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(id >> 32), group, table};
    auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < 10; round++) {
      const std::uint64_t one = std::uint64_t{0xd2511f53u} * c[0], other = std::uint64_t{0xcd9e8d57u} * c[2];
      c = {static_cast<std::uint32_t>(other >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(other),
           static_cast<std::uint32_t>(one >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(one)};
      k0 += 0x9e3779b9u;
      k1 += 0xbb67ae85u;
    }
    return c;
  };
  for (std::size_t n = 0; n < ids.size(); n++) {
    float* row = rows + n * columns;
    for (std::size_t column = first_column; column < first_column + columns;) {
      const auto words = philox(static_cast<std::uint64_t>(ids[n]), static_cast<std::uint32_t>(column / 4));
      do {
        // 24 bits are exact in float32, and so is this number in [-1, 1).
        const float unit = static_cast<float>(words[column % 4] >> 8) * 0x1p-23f - 1.0f;
        row[column - first_column] = unit * bound;
      } while (++column % 4 != 0 && column < first_column + columns);
    }
  }
}

}  // namespace sennit::kernels
