// SPDX-License-Identifier: Apache-2.0
// The cut of a vector into the counts of a plan.
#include <doctest/doctest.h>

#include <numeric>
#include <string>
#include <vector>

#include "executor/vector_cut.hpp"

using namespace sennit;

namespace {

VectorCut cut_of(uint64_t elements_max, uint64_t piece_bytes, uint32_t share_count, uint32_t piece_count) {
  VectorCut cut;
  cut.elements_max = elements_max;
  cut.piece_bytes = piece_bytes;
  cut.share_count = share_count;
  cut.piece_count = piece_count;
  return cut;
}

}  // namespace

TEST_CASE("pieces of all sizes make up the vector, and shares begin on cache lines") {
  VectorCut cut = cut_of(1'000, 256, 3, 6);
  for (uint32_t piece = 0; piece < 18; ++piece) cut.counts.push_back(piece << 8 | 4);
  CHECK(cut.refusal(4).empty());
  for (uint64_t elements = 1; elements <= 1'000; ++elements) {
    const std::vector<uint64_t> starts = cut.starts(elements, 4);
    REQUIRE(starts.size() == 19);
    CHECK(starts.back() == elements * 4);
    for (uint32_t share = 1; share < 3; ++share)
      CHECK((starts[share * 6] % 64 == 0 || starts[share * 6] == elements * 4));
    for (uint32_t piece = 0; piece < 18; ++piece) CHECK(starts[piece + 1] - starts[piece] <= 256);
  }
}

TEST_CASE("counts may be wider than elements, fixed, or what is left of a cache line") {
  VectorCut cut = cut_of(100, 400, 1, 1);
  cut.counts = {0u << 8 | 2, VectorCut::FILL << 8, 3u << 8, 0u << 8 | 4};
  CHECK(cut.refusal(2).empty());
  CHECK(cut.starts(5, 2) == std::vector<uint64_t>{0, 10, 64, 256, 276});
}

TEST_CASE("a cut that leaves elements out, or names no piece, is refused") {
  CHECK(cut_of(0, 4, 1, 1).refusal(4).empty());
  CHECK(cut_of(100, 396, 1, 1).refusal(4) == "its pieces do not hold a share of 400 bytes");
  CHECK(cut_of(100, 0, 1, 1).refusal(4).find("allowed") == std::string::npos);
  CHECK(!cut_of(100, 398, 1, 2).refusal(4).empty());
  CHECK(!cut_of(100, 400, 0, 1).refusal(4).empty());
  CHECK(!cut_of(UINT64_MAX, UINT64_MAX - 3, 1, 1).refusal(4).empty());
  VectorCut cut = cut_of(100, 400, 1, 1);
  cut.counts = {1u << 8 | 4};
  CHECK(cut.refusal(4) == "a count is piece 1 of 1");
}
