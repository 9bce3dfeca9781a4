// SPDX-License-Identifier: Apache-2.0
// Compares the cache with an executable definition of its policies, and a trainer over it with plain memory.
#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <utility>

#include <doctest/doctest.h>

#include "batch_queue.hpp"
#include "dram_store.hpp"
#include "row_cache.hpp"
#include "store_error.hpp"

using namespace sennit::memory;

namespace {

constexpr std::uint64_t WAYS = RowCache::WAYS;

// Rows filled from one number.
struct Numbers {
  explicit Numbers(std::size_t count) : values(count) {}
  Lines lines() { return {{{reinterpret_cast<std::byte*>(values.data()), sizeof(std::uint64_t)}}}; }
  std::vector<std::uint64_t> values;
};

// The policies of docs/reference/embedding-store.md as code, without pins.
struct Definition {
  struct Line {
    bool is_used = false;
    std::uint64_t row = 0, last_batch = 0, batches = 0;
  };
  Definition(std::uint64_t sets, Policy policy) : policy(policy), lines(sets * WAYS) {}

  Line* find(std::uint64_t set, std::uint64_t row) {
    for (std::uint64_t way = 0; way < WAYS; way++)
      if (Line& line = lines[set * WAYS + way]; line.is_used && line.row == row) return &line;
    return nullptr;
  }

  // The lines of a batch's distinct rows, in the order of their first occurrence; none for a conflict.
  std::map<std::uint64_t, std::uint64_t> fetch(const std::vector<std::int64_t>& rows, const RowCache& cache) {
    batch++;
    std::map<std::uint64_t, std::uint64_t> found;
    std::vector<std::uint64_t> missed;
    for (const std::int64_t signed_row : rows) {
      const auto row = static_cast<std::uint64_t>(signed_row);
      Line* line = find(cache.set_of(row), row);
      if (line == nullptr) {
        if (std::find(missed.begin(), missed.end(), row) == missed.end()) missed.push_back(row);
        continue;
      }
      if (line->last_batch != batch) line->batches++;
      line->last_batch = batch;
      found[row] = static_cast<std::uint64_t>(line - lines.data());
    }
    hits += found.size();
    misses += missed.size();
    for (const std::uint64_t row : missed) {
      const std::uint64_t set = cache.set_of(row);
      Line* best = nullptr;
      for (std::uint64_t way = 0; way < WAYS; way++) {
        Line& line = lines[set * WAYS + way];
        if (line.is_used && line.last_batch == batch) continue;  // pinned by this batch
        const auto rank = [&](const Line& of) {
          return std::make_tuple(of.is_used, policy == Policy::LFU ? of.batches : 0, of.last_batch);
        };
        if (best == nullptr || rank(line) < rank(*best)) best = &line;
      }
      if (best == nullptr) {
        conflicts++;
        continue;
      }
      if (best->is_used && ++evictions[set] % RowCache::EVICTIONS_TO_HALVE == 0) {
        for (std::uint64_t way = 0; way < WAYS; way++) lines[set * WAYS + way].batches /= 2;
        halved++;
      }
      *best = {true, row, batch, 1};
      found[row] = static_cast<std::uint64_t>(best - lines.data());
    }
    return found;
  }

  Policy policy;
  std::vector<Line> lines;
  std::map<std::uint64_t, std::uint64_t> evictions;  // of a set
  std::uint64_t batch = 0, hits = 0, misses = 0, conflicts = 0, halved = 0;
};

std::vector<std::int64_t> skewed(std::mt19937_64& random, std::size_t count, std::uint64_t rows) {
  std::vector<std::int64_t> found;
  for (std::size_t n = 0; n < count; n++) {
    const double uniform = std::uniform_real_distribution<>(0, 1)(random);
    found.push_back(static_cast<std::int64_t>(static_cast<double>(rows) * uniform * uniform * uniform));
  }
  return found;
}

}  // namespace

TEST_CASE("which line a row gets is as defined, for LRU and LFU, conflicts too") {
  for (const Policy policy : {Policy::LRU, Policy::LFU}) {
    constexpr std::uint64_t ROWS = 3'000, SETS = 6, SPARES = 400;
    Numbers home(ROWS), held(SETS * WAYS + SPARES);
    DramStore store(home.lines(), ROWS);
    RowCache cache(store, held.lines(), SETS, SPARES, policy);
    Definition definition(SETS, policy);
    std::mt19937_64 random(policy == Policy::LRU ? 1 : 2);
    for (int step = 0; step < 400; step++) {
      const auto rows = skewed(random, step % 50 == 49 ? 600 : 100, ROWS);
      std::vector<std::int64_t> lines(rows.size());
      const auto expected = definition.fetch(rows, cache);
      const RowCache::Pins pins = cache.fetch(rows, lines.data());
      for (std::size_t n = 0; n < rows.size(); n++) {
        const auto found = expected.find(static_cast<std::uint64_t>(rows[n]));
        if (found == expected.end())
          REQUIRE(lines[n] >= static_cast<std::int64_t>(SETS * WAYS));
        else
          REQUIRE(static_cast<std::uint64_t>(lines[n]) == found->second);
      }
      cache.release(pins, step % 2 == 0);
    }
    CHECK(cache.counters().hits == definition.hits);
    CHECK(cache.counters().misses == definition.misses);
    CHECK(cache.counters().conflicts == definition.conflicts);
    CHECK(definition.conflicts > 100);
    CHECK(definition.halved > 10);
  }
}

TEST_CASE("what is computed over a cache with the next batch on its way equals what memory would hold") {
  for (const Policy policy : {Policy::LRU, Policy::LFU}) {
    constexpr std::uint64_t ROWS = 5'000, SETS = 4, SPARES = 1'000;
    Numbers home(ROWS), held(SETS * WAYS + SPARES);
    std::vector<std::uint64_t> memory(ROWS);
    for (std::uint64_t row = 0; row < ROWS; row++) home.values[row] = memory[row] = row;
    DramStore store(home.lines(), ROWS);
    RowCache cache(store, held.lines(), SETS, SPARES, policy);
    std::uint64_t generation = 0;
    {
      BatchQueue queue(cache, ROWS);
      std::mt19937_64 random(3);
      const auto soon = [] { return std::chrono::steady_clock::now() + std::chrono::seconds(60); };
      auto next = queue.fetch(skewed(random, 150, ROWS));
      for (std::uint64_t step = 0; step < 300; step++) {
        const auto batch = std::exchange(next, queue.fetch(skewed(random, 150, ROWS)));
        REQUIRE(queue.wait(batch, soon()));
        for (std::size_t n = 0; n < batch->rows.size(); n++) {
          std::uint64_t& row = memory[static_cast<std::size_t>(batch->rows[n])];
          std::uint64_t& line = held.values[static_cast<std::size_t>(batch->lines[n])];
          REQUIRE(line == row);
          row = line = row * 6364136223846793005 + step;
        }
        queue.release(batch, true);
        if (step % 100 == 50) generation = queue.flush(step, soon()).value();
      }
      queue.release(next, false);
      generation = queue.flush(1, soon()).value();
      CHECK(queue.counters().conflicts > 0);
      CHECK(queue.counters().write_backs > 1'000);
    }
    CHECK(generation == 4);
    CHECK(home.values == memory);
  }
}

TEST_CASE("rows that begin are not read, and those of a batch that is given up are the store's") {
  constexpr std::uint64_t ROWS = 2'000, SETS = 2, SPARES = 100;
  Numbers home(ROWS), held(SETS * WAYS + SPARES);
  std::vector<std::uint64_t> memory(ROWS);
  for (std::uint64_t row = 0; row < ROWS; row++) home.values[row] = memory[row] = row;
  DramStore store(home.lines(), ROWS);
  RowCache cache(store, held.lines(), SETS, SPARES, Policy::LFU);
  std::uint64_t given_up = 0, refused = 0, unread = 0;
  {
    BatchQueue queue(cache, ROWS);
    const auto soon = [] { return std::chrono::steady_clock::now() + std::chrono::seconds(60); };
    std::mt19937_64 random(5);
    for (std::uint64_t step = 0; step < 600; step++) {
      // Some lines are in use beside it, and some batches do not fit.
      const auto beside = queue.fetch(skewed(random, 30, ROWS));
      REQUIRE(queue.wait(beside, soon()));
      auto rows = skewed(random, step % 7 == 0 ? 1'500 : 90, ROWS);
      std::vector<std::int64_t> begins;
      for (const std::int64_t row : rows)
        if (row % 3 == 0 && std::ranges::find(beside->rows, row) == beside->rows.end()) begins.push_back(row);
      const auto batch = queue.fetch(rows, begins);
      bool fits = false;
      try {
        fits = queue.wait(batch, soon());
      } catch (const StoreError& error) {
        CHECK(static_cast<int>(error.fault) == static_cast<int>(Fault::NO_ROOM));
        refused++;
      }
      const bool is_dirty = fits && step % 2 == 0;
      given_up += fits && !is_dirty;
      for (std::size_t n = 0; fits && n < rows.size(); n++) {
        std::uint64_t& row = memory[static_cast<std::size_t>(rows[n])];
        std::uint64_t& line = held.values[static_cast<std::size_t>(batch->lines[n])];
        if (std::ranges::find(begins, rows[n]) == begins.end())
          REQUIRE(line == row);
        else
          unread += line != row;
        if (is_dirty) row = line = row * 6364136223846793005 + step;
      }
      queue.release(batch, is_dirty);
      queue.release(beside, false);
    }
    CHECK(queue.flush(0, soon()) == 1);
    CHECK(queue.counters().begun > 1'000);
    CHECK(queue.counters().conflicts > 0);
  }
  CHECK(given_up > 100);
  CHECK(refused > 50);
  CHECK(unread > 1'000);  // Their lines hold what other rows had.
  CHECK(home.values == memory);
}

TEST_CASE("mistakes are named, and leave the cache as it was") {
  Numbers home(100), held(WAYS + 2);
  DramStore store(home.lines(), 100);
  RowCache cache(store, held.lines(), 1, 2, Policy::LRU);
  BatchQueue queue(cache, 100);
  const auto soon = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  const auto error_of = [](auto function) {
    try {
      function();
    } catch (const StoreError& error) {
      CHECK(static_cast<int>(error.fault) == static_cast<int>(Fault::ARGUMENT));
      return std::string(error.what());
    }
    return std::string("nothing was raised");
  };
  CHECK(error_of([&] { queue.fetch({0, 100}); }).find("row 100 at position 1") == 0);
  CHECK(error_of([&] { queue.fetch({-1}); }).find("row -1 at position 0") == 0);
  const auto batch = queue.fetch({0, 1, 1});
  CHECK(error_of([&] { queue.release(batch, true); }).find("nobody waited") != std::string::npos);
  REQUIRE(queue.wait(batch, soon));
  CHECK(batch->lines[1] == batch->lines[2]);
  CHECK(error_of([&] { queue.flush(0, soon); }).find("1 batches") == 0);
  queue.release(batch, true);
  CHECK(error_of([&] { queue.release(batch, true); }) == "the batch was released");
  CHECK(queue.flush(0, soon) == 1);
}

TEST_CASE("a batch that does not fit is refused alone, and gives back what it has taken") {
  constexpr std::uint64_t ROWS = 2'000, SETS = 2, SPARES = 8;
  Numbers home(ROWS), held(SETS * WAYS + SPARES);
  std::vector<std::uint64_t> memory(ROWS);
  for (std::uint64_t row = 0; row < ROWS; row++) home.values[row] = memory[row] = row;
  DramStore store(home.lines(), ROWS);
  RowCache cache(store, held.lines(), SETS, SPARES, Policy::LFU);
  std::uint64_t refused = 0;
  {
    BatchQueue queue(cache, ROWS);
    const auto soon = [] { return std::chrono::steady_clock::now() + std::chrono::seconds(60); };
    std::mt19937_64 random(4);
    const auto distinct = [&](std::size_t count) {
      std::vector<std::int64_t> all(ROWS), found;
      for (std::size_t row = 0; row < ROWS; row++) all[row] = static_cast<std::int64_t>(row);
      std::sample(all.begin(), all.end(), std::back_inserter(found), count, random);
      return found;
    };
    for (std::uint64_t step = 0; step < 200; step++) {
      // All of these fit, 30 beside 30, and leave changed lines; those of 73 and more cannot.
      const auto batch = queue.fetch(distinct(30));
      REQUIRE(queue.wait(batch, soon()));
      const auto large = queue.fetch(distinct(73 + step));
      const auto beside = queue.fetch(distinct(step % 2 == 0 ? 3 : 60));
      const std::string expected = "a batch needs " + std::to_string(73 + step) +
                                   " rows, other batches hold 30; the cache has 64 lines in sets of 32 and 8 spare "
                                   "ones; give the cache more lines, or fetch smaller batches";
      CHECK_THROWS_WITH_AS(queue.wait(large, soon()), expected.c_str(), StoreError);
      CHECK_THROWS_WITH_AS(queue.wait(large, soon()), expected.c_str(), StoreError);
      queue.release(large, false);
      for (std::size_t n = 0; n < batch->rows.size(); n++) {
        std::uint64_t& row = memory[static_cast<std::size_t>(batch->rows[n])];
        std::uint64_t& line = held.values[static_cast<std::size_t>(batch->lines[n])];
        REQUIRE(line == row);
        row = line = row * 6364136223846793005 + step;
      }
      queue.release(batch, true);
      bool fits = false;
      try {
        fits = queue.wait(beside, soon());
      } catch (const StoreError& error) {
        CHECK(static_cast<int>(error.fault) == static_cast<int>(Fault::NO_ROOM));
        refused++;
      }
      // Rows that the first batch has, too, are changed since they were fetched.
      for (std::size_t n = 0; fits && n < beside->rows.size(); n++)
        REQUIRE(held.values[static_cast<std::size_t>(beside->lines[n])] ==
                memory[static_cast<std::size_t>(beside->rows[n])]);
      queue.release(beside, false);
    }
    CHECK(queue.flush(0, soon()) == 1);
  }
  CHECK(refused > 90);
  CHECK(cache.counters().batches == 400 - refused);  // Those that ran.
  CHECK(home.values == memory);
}
