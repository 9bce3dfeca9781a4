// SPDX-License-Identifier: Apache-2.0
// Folds of products and runs of keys on memory of exactly the right size, under sanitizers, against plain loops.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "instruction_sets.hpp"
#include "products.hpp"
#include "runs.hpp"

using namespace sennit::kernels;

namespace {

struct Shape {
  std::size_t rows, depth, columns;
};

// Rule 9 of docs/reference/embedding.md; volatile, so that nothing is contracted.
std::vector<float> plain(const ProductFold& fold) {
  std::vector<float> result(fold.items * fold.rows * fold.columns);
  for (std::size_t item = 0; item < fold.items; item++)
    for (std::size_t x = 0; x < fold.rows; x++)
      for (std::size_t y = 0; y < fold.columns; y++) {
        float sum = 0;
        for (std::int64_t m = fold.starts[item]; m < fold.starts[item + 1]; m++)
          for (std::size_t k = 0; k < fold.depth; k++) {
            const volatile float product =
                fold.left.data[fold.left.numbers[m] * fold.left.stride + x * fold.left.row_stride +
                               k * fold.left.column_stride] *
                fold.right.data[fold.right.numbers[m] * fold.right.stride + k * fold.right.row_stride + y];
            sum = sum + product;
          }
        result[(item * fold.rows + x) * fold.columns + y] = sum;
      }
  return result;
}

}  // namespace

TEST_CASE("folds of products equal plain loops, matrices as they lie and transposed") {
  const Shape shapes[] = {{1, 1, 1}, {2, 3, 16}, {3, 16, 5}, {4, 8, 33}, {8, 2, 16}, {15, 4, 48}, {16, 7, 31}};
  for (const Kernels* kernels : available_kernels())
    for (const Shape& shape : shapes)
      for (const bool is_transposed : {false, true}) {
        CAPTURE(kernels->name);
        CAPTURE(shape.rows);
        CAPTURE(shape.depth);
        CAPTURE(shape.columns);
        CAPTURE(is_transposed);
        std::mt19937 random(7);
        std::uniform_real_distribution<float> numbers(-1, 1);
        constexpr std::size_t matrix_count = 6, members = 70;
        std::vector<float> left(matrix_count * shape.rows * shape.depth);
        std::vector<float> right(matrix_count * shape.depth * shape.columns);
        for (float& x : left) x = numbers(random);
        for (float& x : right) x = numbers(random);
        std::vector<std::int64_t> of_left(members), of_right(members);
        for (std::int64_t& n : of_left) n = random() % matrix_count;
        for (std::int64_t& n : of_right) n = random() % matrix_count;
        const std::vector<std::int64_t> starts{0, 1, 1, 40, members};
        std::vector<float> result((starts.size() - 1) * shape.rows * shape.columns);
        const std::size_t size = shape.rows * shape.depth;
        ProductFold fold{
            {left.data(), size, is_transposed ? 1 : shape.depth, is_transposed ? shape.rows : 1, of_left.data()},
            {right.data(), shape.depth * shape.columns, shape.columns, 1, of_right.data()},
            starts.data(),
            starts.size() - 1,
            shape.rows,
            shape.depth,
            shape.columns,
            result.data()};
        find_fold_products(kernels->name)(fold);
        const std::vector<float> expected = plain(fold);
        CHECK(std::memcmp(result.data(), expected.data(), result.size() * sizeof(float)) == 0);

        // One member per item.
        std::vector<std::int64_t> each(members + 1);
        for (std::size_t n = 0; n <= members; n++) each[n] = static_cast<std::int64_t>(n);
        std::vector<float> singles(members * shape.rows * shape.columns);
        fold.items = members;
        fold.result = singles.data();
        fold.starts = nullptr;
        find_fold_products(kernels->name)(fold);
        fold.starts = each.data();
        const std::vector<float> expected_singles = plain(fold);
        CHECK(std::memcmp(singles.data(), expected_singles.data(), singles.size() * sizeof(float)) == 0);
      }
}

TEST_CASE("an instruction set that is not there has no folds") {
  const bool is_there = find_fold_products("none") != nullptr;
  CHECK_FALSE(is_there);
}

TEST_CASE("runs hold each kept member once, in order") {
  std::mt19937_64 random(11);
  for (const auto& [key_count, is_sorted] :
       {std::pair{1u, false}, {7u, false}, {600u, false}, {4'000'000'000u, false}, {90u, true}}) {
    CAPTURE(key_count);
    CAPTURE(is_sorted);
    std::vector<std::int64_t> keys(300);
    for (std::int64_t& key : keys)
      key = random() % 5 == 0 ? -1 : static_cast<std::int64_t>(random() % key_count) / (random() % 3 + 1);
    if (is_sorted) {
      for (std::int64_t& key : keys) key = std::max<std::int64_t>(key, 0);
      std::sort(keys.begin(), keys.end());
    }
    std::vector<std::int64_t> distinct(keys.size()), order(keys.size()), starts(keys.size() + 1), places(keys.size());
    std::vector<Entry> scratch;
    const std::size_t count = runs_of(keys.data(), keys.size(), key_count,
                                      {distinct.data(), order.data(), starts.data(), places.data()}, scratch);
    std::size_t kept = 0;
    for (std::size_t member = 0; member < keys.size(); member++) {
      if (keys[member] < 0) {
        CHECK(places[member] == -1);
        continue;
      }
      kept++;
      CHECK(distinct[places[member]] == keys[member]);
    }
    CHECK(starts[0] == 0);
    REQUIRE(starts[count] == static_cast<std::int64_t>(kept));
    for (std::size_t run = 0; run < count; run++) {
      CHECK(starts[run] < starts[run + 1]);
      if (run > 0) CHECK(distinct[run - 1] < distinct[run]);
      for (std::int64_t at = starts[run]; at < starts[run + 1]; at++) {
        CHECK(places[order[at]] == static_cast<std::int64_t>(run));
        if (at > starts[run]) CHECK(order[at - 1] < order[at]);
      }
    }
  }
  std::vector<std::int64_t> start(1);
  std::vector<Entry> scratch;
  CHECK(runs_of(nullptr, 0, 5, {nullptr, nullptr, start.data(), nullptr}, scratch) == 0);
  CHECK(start[0] == 0);
}
