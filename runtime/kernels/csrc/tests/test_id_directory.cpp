// SPDX-License-Identifier: Apache-2.0
// Python tests have the results (tests/runtime/test_id_directory.py). Here sanitizers see what is read and written.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "id_directory.hpp"

using namespace sennit::kernels;

TEST_CASE("ids come and go in directories of any size") {
  std::mt19937_64 random(6);
  for (const std::size_t row_count : {1u, 2u, 12u, 13u, 16u, 100u, 1000u}) {
    std::vector<DirectoryEntry> entries(row_count);
    IdDirectory directory(entries);
    std::map<std::int64_t, std::int64_t> rows;
    for (std::uint32_t step = 1; step < 200; step++) {
      std::vector<std::int64_t> ids(random() % row_count + 1);
      // Half of them come again.
      for (std::int64_t& id : ids)
        id = static_cast<std::int64_t>(random() % 2 == 0 ? random() : random() % (2 * row_count));
      std::ranges::sort(ids);
      ids.erase(std::ranges::unique(ids).begin(), ids.end());
      std::vector<std::int64_t> found(ids.size());
      const std::size_t missing = directory.find(ids, found.data(), step);
      std::vector<std::int64_t> fresh;
      for (std::size_t n = 0; n < ids.size(); n++) {
        const auto known = rows.find(ids[n]);
        REQUIRE(found[n] == (known == rows.end() ? -1 : known->second));
        if (found[n] < 0) fresh.push_back(ids[n]);
      }
      REQUIRE(missing == fresh.size());
      if (fresh.size() > directory.free()) {
        const auto gone = directory.victims(fresh.size() - directory.free(), Eviction::LRU, step);
        for (const std::int64_t row : gone) rows.erase(entries[static_cast<std::size_t>(row)].id);
        directory.evict(gone);
      }
      const std::vector<std::uint32_t> counts(fresh.size(), 1);
      std::vector<std::int64_t> given(fresh.size());
      directory.admit(fresh, counts.data(), step, given.data());
      for (std::size_t n = 0; n < fresh.size(); n++) rows[fresh[n]] = given[n];
      REQUIRE(directory.used() == rows.size());
    }
  }
}

TEST_CASE("ids are dealt inside the given memory, and lengths that do not count them are told") {
  const std::vector<std::int64_t> ids{5, -7, 1ll << 60, 5};
  std::vector<std::int32_t> lengths{1, 0, 3}, of_shards(9);
  std::vector<std::int64_t> dealt(ids.size());
  CHECK(split_ids(ids, {lengths.data(), false}, 3, 3, of_shards.data(), dealt.data()));
  for (const std::int32_t wrong : {2, -1, 0}) {
    lengths[0] = wrong;
    CHECK_FALSE(split_ids(ids, {lengths.data(), false}, 3, 3, of_shards.data(), dealt.data()));
  }
  std::vector<float> rows(2 * 5);
  initial_rows(std::span(ids).first(2), 3, 5, 1, 2, 0.5f, rows.data());
  CHECK(std::ranges::all_of(rows, [](float x) { return x >= -0.5f && x < 0.5f; }));
}
