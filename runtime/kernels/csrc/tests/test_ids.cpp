// SPDX-License-Identifier: Apache-2.0
// Python tests have the results (tests/runtime/test_embedding_ids.py). Here sanitizers see what is written.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "ids.hpp"

using namespace sennit::kernels;

TEST_CASE("ids are dealt to shards inside the given memory, whatever lengths and ids say") {
  std::mt19937 random(3);
  for (int round = 0; round < 300; round++) {
    const std::size_t bags = random() % 20;
    std::vector<std::int32_t> lengths(bags);
    std::size_t count = 0;
    for (std::int32_t& length : lengths) count += static_cast<std::size_t>(length = static_cast<int>(random() % 5));
    std::vector<std::int64_t> values(count), dealt(count);
    for (std::int64_t& id : values) id = random() % 100;
    std::vector<std::int64_t> borders{0};
    for (std::size_t shard = random() % 80; shard != 0; shard--) borders.push_back(random() % 101);
    borders.push_back(100);
    std::ranges::sort(borders);
    std::vector<std::int32_t> of_shards((borders.size() - 1) * bags);
    const auto is_dealt = [&] {
      return split_rows({lengths.data(), false}, bags, {values.data(), true}, count, borders, of_shards.data(),
                        dealt.data());
    };
    REQUIRE(is_dealt());
    std::size_t at = 0;
    for (std::size_t shard = 0; shard + 1 < borders.size(); shard++)
      for (std::size_t bag = 0; bag < bags; bag++)
        for (std::int32_t n = 0; n < of_shards[shard * bags + bag]; n++)
          CHECK(dealt[at++] + borders[shard] < borders[shard + 1]);
    CHECK(at == count);
    if (count == 0) continue;
    values[random() % count] = random() % 2 == 0 ? -1 : 100;
    CHECK_FALSE(is_dealt());
    std::ranges::fill(values, 7);
    lengths[random() % bags] += random() % 2 == 0 ? 1 : -6;
    CHECK_FALSE(is_dealt());
  }
}

TEST_CASE("distinct ids by bits and by sort") {
  std::mt19937 random(4);
  for (const std::uint32_t row_count : {1u, 63u, 64u, 65u, 3000u, 1u << 20, 0xffffffffu}) {
    std::vector<std::int64_t> values(100), ids(100), places(100), wanted;
    for (std::int64_t& id : values) id = random() % row_count;
    values[50] = row_count - 1;
    wanted = values;
    std::ranges::sort(wanted);
    wanted.erase(std::ranges::unique(wanted).begin(), wanted.end());
    const std::size_t count = distinct({values.data(), true}, values.size(), ids.data(), places.data());
    REQUIRE(count == wanted.size());
    CHECK(std::equal(wanted.begin(), wanted.end(), ids.begin()));
    for (std::size_t n = 0; n < values.size(); n++) CHECK(ids[places[n]] == values[n]);
  }
  for (const std::int64_t wrong : {std::int64_t{-1}, std::int64_t{0xffffffff}}) {
    std::int64_t ids[1], places[1];
    CHECK(distinct({&wrong, true}, 1, ids, places) == SIZE_MAX);
  }
}
