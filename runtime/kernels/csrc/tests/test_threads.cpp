// SPDX-License-Identifier: Apache-2.0
// Results are the same for any number of threads, however runs are cut. TSan runs this, too
// (docs/reference/embedding.md).
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <vector>

#include "instruction_sets.hpp"
#include "operator.hpp"
#include "parallel.hpp"

using namespace sennit::kernels;

namespace {

constexpr std::uint32_t row_count = 3000;
constexpr std::size_t bag_count = 6000;

struct Shape {
  std::size_t dim;
  Pooling pooling;
  bool is_weighted;
  // The share of lookups that name one row.
  double giant;
  // The slice of the global batch that the second block of a table is in. The others are in slice 2.
  std::uint16_t slice = 2;
};

// The memory after two steps, and how much scratch memory they needed.
struct Left {
  std::vector<float> results, dots, sums, weights, states;
  std::vector<std::int64_t> rows;
  std::vector<BadTable> bad;
  std::size_t scratch_bytes, lookups;
};

Left run(const Shape& shape, unsigned threads) {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> numbers(-1, 1);
  std::vector<std::vector<float>> tables(3), states(3);
  Operator op(*available_kernels().front(), Optimizer::row_wise_adagrad, threads);
  Operator summing(*available_kernels().front(), Optimizer::none, threads);
  for (std::size_t n = 0; n < tables.size(); n++) {
    tables[n].resize(row_count * shape.dim);
    for (float& x : tables[n]) x = numbers(random);
    states[n].resize(row_count);
    for (Operator* each : {&op, &summing})
      each->add({reinterpret_cast<std::byte*>(tables[n].data()),
                 row_count,
                 static_cast<std::uint32_t>(shape.dim),
                 Precision::fp32,
                 0,
                 0,
                 {states[n].data(), nullptr}});
  }
  // Table 2 has two blocks, the others have one. Table 1 has few lookups.
  const std::vector<std::uint32_t> of_block{2, 0, 1, 2};
  const std::vector<std::size_t> bags{bag_count / 3, bag_count, 5, bag_count / 2};
  const std::vector<std::uint16_t> slices{2, 2, 2, shape.slice};
  std::vector<std::int32_t> lengths;
  for (const std::size_t count : bags)
    for (std::size_t bag = 0; bag < count; bag++) lengths.push_back(static_cast<std::int32_t>(random() % 12));
  std::size_t lookups = 0;
  for (const std::int32_t length : lengths) lookups += length;
  std::vector<std::int64_t> values(lookups);
  std::vector<float> weights(lookups);
  Left left{};
  left.lookups = lookups;
  for (std::uint32_t number = 1; number <= 2; number++) {
    for (std::int64_t& id : values)
      id = std::bernoulli_distribution(shape.giant)(random) ? 1234 : static_cast<std::int64_t>(random() % row_count);
    values[7] = -1;
    for (float& x : weights) x = numbers(random);
    const Batch batch{{lengths.data(), false},
                      {values.data(), true},
                      shape.is_weighted ? weights.data() : nullptr,
                      shape.pooling,
                      slices.data()};
    const auto blocks = op.blocks(batch, of_block, bags);
    std::vector<float> result((shape.pooling == Pooling::none ? lookups : lengths.size()) * shape.dim);
    std::vector<float> gradient(result.size()), dots(lookups);
    op.lookup(batch, blocks, result.data());
    for (float& x : gradient) x = numbers(random);
    if (number == 2) gradient[gradient.size() / 3] = __builtin_inff();
    if (shape.is_weighted) op.weight_gradient(batch, blocks, gradient.data(), dots.data());
    Step step{};
    step.rate = 0.1f;
    step.keep = 1;
    step.epsilon = 1e-8f;
    step.max_gradient = 5.0f;
    step.max_norm = 3.0f;
    std::vector<std::vector<std::int64_t>> rows(tables.size());
    std::vector<std::vector<float>> sums(tables.size());
    summing.sum_rows(batch, blocks, gradient.data(), [&](std::uint32_t table, std::size_t count) -> RowSums {
      rows[table].resize(count);
      sums[table].resize(count * shape.dim);
      return {rows[table].data(), sums[table].data()};
    });
    for (std::size_t n = 0; n < tables.size(); n++) {
      left.rows.insert(left.rows.end(), rows[n].begin(), rows[n].end());
      left.sums.insert(left.sums.end(), sums[n].begin(), sums[n].end());
    }
    for (const BadTable& bad : op.update(batch, blocks, gradient.data(), step)) left.bad.push_back(bad);
    left.results.insert(left.results.end(), result.begin(), result.end());
    left.dots.insert(left.dots.end(), dots.begin(), dots.end());
  }
  for (const auto& table : tables) left.weights.insert(left.weights.end(), table.begin(), table.end());
  for (const auto& state : states) left.states.insert(left.states.end(), state.begin(), state.end());
  left.scratch_bytes = op.scratch_bytes();
  return left;
}

bool same_bits(const std::vector<float>& one, const std::vector<float>& other) {
  return one.size() == other.size() && std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0;
}

void check_threads(const std::vector<Shape>& shapes, const std::vector<unsigned>& counts) {
  for (const Shape& shape : shapes) {
    CAPTURE(shape.dim);
    CAPTURE(shape.giant);
    const Left one = run(shape, 1);
    REQUIRE(!one.bad.empty());
    for (const unsigned threads : counts) {
      CAPTURE(threads);
      const Left several = run(shape, threads);
      CHECK(same_bits(several.results, one.results));
      CHECK(same_bits(several.dots, one.dots));
      CHECK(several.rows == one.rows);
      CHECK(same_bits(several.sums, one.sums));
      CHECK(same_bits(several.weights, one.weights));
      CHECK(same_bits(several.states, one.states));
      CHECK(std::ranges::equal(several.bad, one.bad, [](const BadTable& a, const BadTable& b) {
        return a.table == b.table && a.row_count == b.row_count && a.first_row == b.first_row;
      }));
      // Also a vector for each level of each worker's tree, and for each piece of a cut run.
      const std::size_t vectors = threads * sum_count(one.lookups, shape.slice != 2) + one.lookups / 1024;
      CHECK(several.scratch_bytes <= 24 * one.lookups + vectors * sum_stride(shape.dim) * sizeof(float) + 5 * 64);
    }
  }
}

}  // namespace

TEST_CASE("any number of threads makes the bits of one") {
  check_threads({{64, Pooling::sum, false, 0.9}, {20, Pooling::sum, true, 0.2, 40'000}, {3, Pooling::none, false, 0.7}},
                {2u, 7u});
}

TEST_CASE("any number of threads makes the bits of one, for more shapes" * doctest::test_suite("long")) {
  check_threads({{64, Pooling::sum, false, 0.0},
                 {64, Pooling::sum, false, 0.9},
                 {20, Pooling::sum, true, 0.6},
                 {16, Pooling::mean, false, 1.0},
                 {3, Pooling::none, false, 0.7},
                 {64, Pooling::sum, false, 0.9, 5},
                 {20, Pooling::sum, true, 0.2, 40'000}},
                {2u, 3u, 7u});
}

TEST_CASE("each job is done once, and no two at once by one worker") {
  for (const unsigned threads : {1u, 2u, 5u}) {
    std::vector<std::atomic<int>> done(1000), busy(threads);
    std::atomic<int> clashes{0};
    parallel_for(threads, done.size(), [&](std::size_t n, unsigned worker) {
      if (busy[worker]++ != 0) clashes++;
      done[n]++;
      busy[worker]--;
    });
    CHECK(clashes == 0);
    CHECK(std::ranges::all_of(done, [](const std::atomic<int>& times) { return times == 1; }));
  }
  parallel_for(4, 0, [](std::size_t, unsigned) { FAIL("there is no job"); });
}
