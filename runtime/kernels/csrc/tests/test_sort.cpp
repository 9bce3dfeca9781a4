// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
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

TEST_CASE("the stack of a sum joins the halves of nodes") {
  // Sums are texts here. Slices 0, 2, 3 and 9; slice 2 has three chunks.
  std::vector<std::string> sums;
  TreeStack stack;
  const auto add = [&](std::size_t times) {
    for (; times != 0; times--) {
      const std::string right = sums.back();
      sums.pop_back();
      sums.back() = "(" + sums.back() + right + ")";
    }
  };
  const std::vector<std::pair<std::uint64_t, std::string>> leaves{
      {TreeStack::leaf(0, 0), "a"}, {TreeStack::leaf(2, 0), "b"}, {TreeStack::leaf(2, 1), "c"},
      {TreeStack::leaf(2, 2), "d"}, {TreeStack::leaf(3, 0), "e"}, {TreeStack::leaf(9, 0), "f"}};
  for (const auto& [leaf, name] : leaves) {
    add(stack.push(leaf));
    sums.push_back(name);
    CHECK(stack.depth() == sums.size());
  }
  add(stack.depth() - 1);
  CHECK(sums.front() == "((a(((bc)d)e))f)");
}

TEST_CASE("a stack has room for the sums of any run") {
  TreeStack stack;
  std::size_t most = 0;
  for (std::uint64_t chunk = 0; chunk < 1024; chunk++) {
    stack.push(TreeStack::leaf(0, chunk));
    most = std::max(most, stack.depth());
  }
  CHECK(most == 11);
  CHECK(most <= sum_count(1024 * chunk_lookups, false));
  CHECK(sum_count(1, false) == 2);
  // Each leaf is in the right half of what is left: no two are joined before the end.
  TreeStack deep;
  std::uint64_t slice = 0, chunk = 0;
  deep.push(TreeStack::leaf(0, 0));
  for (int bit = 15; bit >= 0; bit--) deep.push(TreeStack::leaf(slice |= std::uint64_t{1} << bit, 0));
  for (int bit = 26; bit >= 0; bit--) deep.push(TreeStack::leaf(slice, chunk |= std::uint64_t{1} << bit));
  CHECK(deep.depth() == 1 + 16 + 27);
  CHECK(deep.depth() <= sum_count(std::size_t{1} << 32, true));
}

TEST_CASE("columns are padded to a power of two from 16") {
  CHECK(padded(1) == 16);
  CHECK(padded(16) == 16);
  CHECK(padded(17) == 32);
  CHECK(padded(92) == 128);
}
