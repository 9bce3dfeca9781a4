// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "sort.hpp"

using namespace sennit::kernels;

TEST_CASE("a radix sort is the stable sort by row, at every number of rows that changes its passes") {
  std::mt19937 random(1);
  for (const std::uint32_t row_count :
       {1u, 2u, 511u, 512u, 513u, 1000u, 1u << 18, (1u << 18) + 1, 1u << 27, (1u << 27) + 1, 0xffffffffu}) {
    for (const std::size_t count : {0, 1, 2, 1000}) {
      std::vector<Entry> given(count), one(count), other(count);
      for (std::uint32_t key = 0; key < count; key++)
        given[key] = {static_cast<std::uint32_t>(random() % std::min(row_count, 300u)), key};
      // Includes the highest row, so that all digits are used.
      if (count > 2)
        for (const std::size_t place : {std::size_t{1}, count / 2}) given[place] = {row_count - 1, given[place].key()};
      RowSort sort(row_count);
      REQUIRE(sort.buffer_count() == (row_count > 512 ? 2 : 1));
      const auto sorted = sort(
          [&](auto take) {
            for (const Entry& entry : given) take(entry.row(), entry.key());
          },
          one.data(), sort.buffer_count() == 2 ? other.data() : nullptr);
      std::stable_sort(given.begin(), given.end(), [](const Entry& a, const Entry& b) { return a.row() < b.row(); });
      REQUIRE(sorted.size() == count);
      CHECK(std::equal(sorted.begin(), sorted.end(), given.begin(),
                       [](const Entry& a, const Entry& b) { return a.row() == b.row() && a.key() == b.key(); }));
    }
  }
}

TEST_CASE("a tree over the chunks of a run has a level for each carry") {
  CHECK(level_count(0) == 1);
  CHECK(level_count(32) == 1);
  CHECK(level_count(33) == 2);
  CHECK(level_count(64) == 2);
  CHECK(level_count(65) == 3);
  CHECK(level_count(32u * 1024) == 11);
  CHECK(padded(1) == 16);
  CHECK(padded(16) == 16);
  CHECK(padded(17) == 32);
  CHECK(padded(92) == 128);
}
