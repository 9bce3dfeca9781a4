// SPDX-License-Identifier: Apache-2.0
#include "ids.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "sort.hpp"

namespace sennit::kernels {

namespace {

// Above this number of shards a binary search is faster than as many comparisons.
constexpr std::size_t most_compared = 64;

std::size_t shard_of(std::int64_t id, std::span<const std::int64_t> borders) {
  const std::span<const std::int64_t> inner = borders.subspan(1, borders.size() - 2);
  if (inner.size() >= most_compared) return std::ranges::upper_bound(inner, id) - inner.begin();
  std::size_t shard = 0;
  for (const std::int64_t border : inner) shard += id >= border;
  return shard;
}

template <typename Id>
bool split(const Integers& lengths, std::size_t bags, const Id* values, std::size_t count,
           std::span<const std::int64_t> borders, std::int32_t* lengths_of_shards, Id* values_of_shards) {
  const std::size_t shards = borders.size() - 1;
  std::fill_n(lengths_of_shards, shards * bags, 0);
  const auto shard_of_id = std::make_unique_for_overwrite<std::uint32_t[]>(count);
  std::vector<std::size_t> next(shards + 1);
  std::size_t at = 0;
  for (std::size_t bag = 0; bag < bags; bag++) {
    // As an unsigned number, a negative length is too large as well.
    const auto length = static_cast<std::uint64_t>(lengths[bag]);
    if (length > count - at) return false;
    for (const std::size_t end = at + length; at < end; at++) {
      if (values[at] < borders.front() || values[at] >= borders.back()) return false;
      const std::size_t shard = shard_of(values[at], borders);
      shard_of_id[at] = static_cast<std::uint32_t>(shard);
      lengths_of_shards[shard * bags + bag]++;
      next[shard + 1]++;
    }
  }
  std::partial_sum(next.begin(), next.end(), next.begin());
  for (std::size_t n = 0; n < at; n++) {
    const std::uint32_t shard = shard_of_id[n];
    values_of_shards[next[shard]++] = static_cast<Id>(values[n] - borders[shard]);
  }
  return at == count;
}

// Marks ids in a table of bits. The place of an id is the number of bits before it.
std::size_t distinct_by_bits(const Integers& values, std::size_t count, std::size_t words, std::int64_t* ids,
                             std::int64_t* places) {
  std::vector<std::uint64_t> bits(words);
  for (std::size_t n = 0; n < count; n++) bits[values[n] >> 6] |= std::uint64_t{1} << (values[n] & 63);
  std::vector<std::uint32_t> before(words);
  std::size_t found = 0;
  for (std::size_t word = 0; word < words; word++) {
    before[word] = static_cast<std::uint32_t>(found);
    for (std::uint64_t rest = bits[word]; rest != 0; rest &= rest - 1)
      ids[found++] = static_cast<std::int64_t>(word * 64 + std::countr_zero(rest));
  }
  for (std::size_t n = 0; n < count; n++) {
    const std::uint64_t lower = (std::uint64_t{1} << (values[n] & 63)) - 1;
    places[n] = before[values[n] >> 6] + std::popcount(bits[values[n] >> 6] & lower);
  }
  return found;
}

std::size_t distinct_by_sort(const Integers& values, std::size_t count, std::uint32_t value_count, std::int64_t* ids,
                             std::int64_t* places) {
  const auto one = std::make_unique_for_overwrite<Entry[]>(count),
             other = std::make_unique_for_overwrite<Entry[]>(count);
  const auto each = [&](auto take) {
    for (std::size_t n = 0; n < count; n++) take(static_cast<std::uint32_t>(values[n]), static_cast<std::uint32_t>(n));
  };
  std::size_t found = 0;
  for (const Entry& entry : RowSort(value_count)(each, one.get(), other.get())) {
    if (found == 0 || ids[found - 1] != entry.row()) ids[found++] = entry.row();
    places[entry.key()] = static_cast<std::int64_t>(found) - 1;
  }
  return found;
}

}  // namespace

bool split_rows(const Integers& lengths, std::size_t bags, const Integers& values, std::size_t count,
                std::span<const std::int64_t> borders, std::int32_t* lengths_of_shards, void* values_of_shards) {
  if (values.is_wide)
    return split(lengths, bags, static_cast<const std::int64_t*>(values.data), count, borders, lengths_of_shards,
                 static_cast<std::int64_t*>(values_of_shards));
  return split(lengths, bags, static_cast<const std::int32_t*>(values.data), count, borders, lengths_of_shards,
               static_cast<std::int32_t*>(values_of_shards));
}

std::size_t distinct(const Integers& values, std::size_t count, std::int64_t* ids, std::int64_t* places) {
  // As an unsigned number, a negative value is too large as well.
  std::uint64_t most = 0;
  for (std::size_t n = 0; n < count; n++) most = std::max(most, static_cast<std::uint64_t>(values[n]));
  if (count == 0) return 0;
  if (most >= std::numeric_limits<std::uint32_t>::max() || count > std::numeric_limits<std::uint32_t>::max())
    return SIZE_MAX;
  // A word of bits costs as much as sorting two values.
  const std::size_t words = most / 64 + 1;
  if (2 * words <= count) return distinct_by_bits(values, count, words, ids, places);
  return distinct_by_sort(values, count, static_cast<std::uint32_t>(most + 1), ids, places);
}

}  // namespace sennit::kernels
