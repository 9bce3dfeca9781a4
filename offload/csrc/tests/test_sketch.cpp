// SPDX-License-Identifier: Apache-2.0
// Counts the ids in a slot, in lists and in single fields. Python compares the cells with the reference.
#include <doctest/doctest.h>

#include <numeric>
#include <stdexcept>

#include "packets.hpp"
#include "sketch.hpp"

using namespace sennit::offload;

TEST_CASE("every id of the sampled rows is counted once in each line") {
  Receiver receiver(big_endian_schema(), {}, {.schema_id = 7, .id = 9}, 16, 2);
  const Bytes datagram = packet({.records = 3}, joined({record(1, 2), record(2, 0), record(3, 7)}));
  const Receiver::Datagram one(datagram);
  receiver.take({&one, 1});
  Program program;
  for (const bool is_dense : {true, true, false, false, false})
    is_dense ? program.dense_source() : program.ids_source();
  const std::vector<std::size_t> sparse{3, 2};
  const SketchShape all{.width = 8, .depth = 3, .sample_shift = 0};
  std::vector<std::uint64_t> counts(2 * 3 * 8);
  CHECK(count_ids(receiver, 0, program, sparse, all, counts) == 3);
  for (std::size_t line = 0; line < 6; line++)
    CHECK(std::accumulate(&counts[line * 8], &counts[line * 8] + 8, 0ull) == (line < 3 ? 9 : 6));
  // The slot of the other batch is empty.
  CHECK(count_ids(receiver, 1, program, sparse, all, counts) == 0);
  const std::span<std::uint64_t> short_by_one = std::span(counts).first(counts.size() - 1);
  CHECK_THROWS_AS(count_ids(receiver, 0, program, sparse, all, short_by_one), std::invalid_argument);
  CHECK_THROWS_AS(count_ids(receiver, 0, program, {3, 0}, all, counts), std::invalid_argument);
}
