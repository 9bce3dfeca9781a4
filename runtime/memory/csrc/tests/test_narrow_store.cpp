// SPDX-License-Identifier: Apache-2.0
// Rows of 16 bits under memory of exactly the right size, with sanitizers. tests/runtime/test_memory_narrow.py tests
// the rounding.
#include <doctest/doctest.h>

#include <cstring>
#include <vector>

#include "dram_store.hpp"
#include "narrow_store.hpp"
#include "store_error.hpp"

using namespace sennit::memory;
using sennit::kernels::Precision;

namespace {

constexpr std::uint64_t ROW_COUNT = 5;

// Tables of 3, 0 and 2 rows over `below`.
NarrowStore narrow(RowStore& below, std::uint32_t dim, Precision precision, bool is_stochastic) {
  return {below,
          {{nullptr, 3, dim, precision, 0, 1, {}},
           {nullptr, 0, dim, precision, 0, 2, {}},
           {nullptr, 2, dim, precision, 7, 3, {}}},
          is_stochastic,
          99,
          0};
}

template <typename Element>
Lines lines_of(std::vector<Element>& weights, std::vector<double>& states, std::size_t dim) {
  return {{{reinterpret_cast<std::byte*>(weights.data()), dim * sizeof(Element)},
           {reinterpret_cast<std::byte*>(states.data()), sizeof(double)}}};
}

}  // namespace

TEST_CASE("what 16 bits hold comes back as it was, and other parts of a row with it") {
  for (const std::uint32_t dim : {1, 3, 16, 20, 64, 70})
    for (const Precision precision : {Precision::fp16, Precision::bf16})
      for (const bool is_stochastic : {false, true}) {
        std::vector<std::uint16_t> stored(ROW_COUNT * dim);
        std::vector<double> stored_states(ROW_COUNT);
        DramStore below(lines_of(stored, stored_states, dim), ROW_COUNT);
        NarrowStore store = narrow(below, dim, precision, is_stochastic);
        std::vector<float> weights(2 * dim), back(2 * dim);
        for (std::size_t n = 0; n < weights.size(); n++) weights[n] = 0.5f * static_cast<float>(n % 31) - 7;
        std::vector<double> states{0.25, 4}, back_states(2);
        const std::vector<RowAt> written{{4, 0}, {1, 1}}, wanted{{1, 0}, {4, 1}};
        store.exchange(written, {}, lines_of(weights, states, dim));
        store.exchange({}, wanted, lines_of(back, back_states, dim));
        CHECK(std::memcmp(back.data(), weights.data() + dim, dim * sizeof(float)) == 0);
        CHECK(std::memcmp(back.data() + dim, weights.data(), dim * sizeof(float)) == 0);
        CHECK(back_states == std::vector<double>{4, 0.25});
        // The rows between them are unchanged.
        for (const std::size_t row : {0, 2, 3})
          for (std::size_t column = 0; column < dim; column++) CHECK(stored[row * dim + column] == 0);
      }
}

TEST_CASE("a row that a batch brings in after it was written is the written one") {
  std::vector<std::uint16_t> stored(ROW_COUNT * 4);
  std::vector<double> stored_states(ROW_COUNT);
  DramStore below(lines_of(stored, stored_states, 4), ROW_COUNT);
  NarrowStore store = narrow(below, 4, Precision::bf16, false);
  std::vector<float> weights{1, 2, 3, 4, 0, 0, 0, 0};
  std::vector<double> states{5, 0};
  const std::vector<RowAt> written{{2, 0}}, wanted{{2, 1}};
  store.exchange(written, wanted, lines_of(weights, states, 4));
  CHECK(weights == std::vector<float>{1, 2, 3, 4, 1, 2, 3, 4});
  CHECK(states == std::vector<double>{5, 5});
  CHECK_THROWS_AS(store.exchange({}, std::vector<RowAt>{{ROW_COUNT, 0}}, lines_of(weights, states, 4)), StoreError);
}
