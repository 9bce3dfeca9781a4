// SPDX-License-Identifier: Apache-2.0
// Attention with memory that ends where its rows end, so that sanitizers see a step beyond, and with the bits of
// another instruction set. Its values are tested in Python.
#include <doctest/doctest.h>

#include <bit>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "attention.hpp"

using namespace sennit::kernels;

namespace sennit::kernels {
std::size_t other_reciprocals(std::uint32_t exponent);
}

namespace {

struct Shape {
  std::vector<std::int64_t> lengths, targets;
  std::size_t heads, dim, width, context;
  std::int64_t window;
  bool is_softmax, is_causal, has_bias;
};

template <typename Number>
Number number(float x) {
  if constexpr (std::is_same_v<Number, float>)
    return x;
  else
    return static_cast<Number>(std::bit_cast<std::uint32_t>(x) >> 16);
}

float float_of(float x) { return x; }
float float_of(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

// The output, and all gradients, one after another. `Number` is float, or std::uint16_t for bfloat16.
template <typename Number>
std::vector<float> run(const Shape& shape, const AttentionSet& kernels, unsigned threads) {
  std::mt19937 random(7);
  std::vector<std::int64_t> offsets{0}, times;
  for (const std::int64_t length : shape.lengths) {
    offsets.push_back(offsets.back() + length);
    for (std::int64_t place = 0; place < length; place++) times.push_back(place * place / 3);
  }
  const auto rows = static_cast<std::size_t>(offsets.back()), sequences = shape.lengths.size();
  const auto draw = [&](std::size_t count) {
    std::vector<float> drawn(count);
    // Exact on any processor.
    for (float& x : drawn) x = static_cast<float>(random() >> 8) * 0x1p-23f - 1.0f;
    return drawn;
  };
  const auto draw_rows = [&](std::size_t count) {
    std::vector<Number> drawn;
    for (const float x : draw(count)) drawn.push_back(number<Number>(x));
    return drawn;
  };
  const auto part = [&](std::vector<Number>& all, std::size_t dim) {
    return HeadRows{all.data(), shape.heads * dim, dim, dim};
  };
  std::vector<Number> query = draw_rows(rows * shape.heads * shape.dim), key = draw_rows(query.size());
  std::vector<Number> value = draw_rows(rows * shape.heads * shape.width), arriving = draw_rows(value.size());
  const std::vector<float> positions = draw(shape.heads * 4), by_time = draw(shape.heads * 3);
  const std::vector<std::int64_t> boundaries{2, 30};
  Attention attention{.query = part(query, shape.dim),
                      .key = part(key, shape.dim),
                      .value = part(value, shape.width),
                      .offsets = offsets.data(),
                      .targets = shape.targets.empty() ? nullptr : shape.targets.data(),
                      .sequences = sequences,
                      .heads = shape.heads,
                      .context = shape.context,
                      .scale = 0.5f,
                      .share = 0.25f,
                      .is_softmax = shape.is_softmax,
                      .is_causal = shape.is_causal,
                      .is_bf16 = std::is_same_v<Number, std::uint16_t>,
                      .window = shape.window,
                      .position_bias = nullptr,
                      .positions = 0,
                      .time_bias = nullptr,
                      .times = nullptr,
                      .boundaries = nullptr,
                      .boundary_count = 0};
  if (shape.has_bias) {
    attention.position_bias = positions.data();
    attention.positions = 4;
    attention.time_bias = by_time.data();
    attention.times = times.data();
    attention.boundaries = boundaries.data();
    attention.boundary_count = boundaries.size();
  }
  std::vector<float> statistics(rows * shape.heads * 2);
  std::vector<Number> output(value.size()), of_query(query.size()), of_key(key.size()), of_value(value.size());
  std::vector<float> of_bias((sequences + 1) * shape.heads * attention.bias_entries());
  attend(kernels, attention, {part(output, shape.width), statistics.data()}, threads);
  differentiate(kernels, attention,
                {part(arriving, shape.width), statistics.data(), part(of_query, shape.dim), part(of_key, shape.dim),
                 part(of_value, shape.width), shape.has_bias ? of_bias.data() : nullptr},
                threads);
  std::vector<float> all;
  for (const auto* part : {&output, &of_query, &of_key, &of_value})
    for (const Number x : *part) all.push_back(float_of(x));
  all.insert(all.end(), of_bias.begin(), of_bias.end());
  return all;
}

constexpr std::int64_t everywhere = std::numeric_limits<std::int64_t>::max();

const Shape shapes[] = {
    {{3, 0, 50, 1}, {}, 2, 20, 24, 0, everywhere, true, true, false},
    {{3, 0, 50, 1}, {1, 0, 9, 1}, 1, 16, 5, 0, everywhere, true, true, true},
    {{97, 16}, {40, 0}, 1, 1, 17, 3, 6, false, true, true},
    {{33}, {2}, 3, 7, 16, 0, 4, false, false, false},
    {{64, 5}, {}, 1, 32, 32, 70, 1, true, false, true},
    {{0}, {}, 2, 4, 4, 0, 0, true, true, true},
};

// Numbers of any kind, of equal size, near the least ones, or whose products are near those.
std::uint16_t draw_half(std::mt19937& random, int kind) {
  const auto drawn = static_cast<std::uint32_t>(random()), fraction = drawn & 0x807f, choice = drawn >> 16;
  switch (kind) {
    case 0:
      return static_cast<std::uint16_t>(drawn);
    case 1:
      return static_cast<std::uint16_t>(fraction | (110 + choice % 30) << 7);
    case 2:
      return static_cast<std::uint16_t>(fraction | choice % 70 << 7);
    default:
      return static_cast<std::uint16_t>(fraction | (55 + choice % 12) << 7);
  }
}

// Two blocks of 32, 32 rows and 32 columns.
std::vector<float> multiply(const AttentionSet& set, int kind, std::uint32_t seed, bool adds) {
  std::mt19937 random(seed);
  const auto draw = [&](std::size_t count) {
    std::vector<std::uint16_t> drawn(count);
    for (std::uint16_t& half : drawn) half = draw_half(random, kind);
    return drawn;
  };
  const std::vector<std::uint16_t> left = draw(32 * 64), right = draw(4 * tile_halves);
  std::vector<float> result(32 * 32);
  for (float& x : result)
    x = std::bit_cast<float>(std::uint32_t{draw_half(random, kind)} << 16 | static_cast<std::uint16_t>(random()));
  set.of_bf16->multiply({.left = left.data(),
                         .left_stride = 64,
                         .right = right.data(),
                         .right_block_stride = 2 * tile_halves,
                         .right_tile_stride = tile_halves,
                         .result = result.data(),
                         .result_stride = 32,
                         .row_tiles = 2,
                         .column_tiles = 2,
                         .blocks = 2,
                         .adds = adds});
  return result;
}

// FNV-1a of the bits.
std::uint64_t digest(const std::vector<float>& numbers) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const float x : numbers) {
    hash ^= std::bit_cast<std::uint32_t>(x);
    hash *= 0x100000001b3;
  }
  return hash;
}

void check_products(std::uint32_t first_seed, std::uint32_t last_seed) {
  const AttentionSet& portable = attention_sets().back();
  for (int kind = 0; kind < 4; kind++)
    for (std::uint32_t seed = first_seed; seed < last_seed; seed++) {
      const std::vector<float> expected = multiply(portable, kind, seed, seed % 2 == 0);
      for (const AttentionSet& set : attention_sets()) {
        const std::vector<float> found = multiply(set, kind, seed, seed % 2 == 0);
        std::size_t others = 0;
        for (std::size_t at = 0; at < found.size(); at++) {
          const bool is_nan = found[at] != found[at] && expected[at] != expected[at];
          others += !is_nan && std::bit_cast<std::uint32_t>(found[at]) != std::bit_cast<std::uint32_t>(expected[at]);
        }
        CAPTURE(set.name);
        CHECK(others == 0);
      }
    }
}

}  // namespace

TEST_CASE("attention of float32 has the same bits on any processor") {
  const std::uint64_t expected[] = {15499524521834503297u, 6525342788424256247u,  12145360007898683342u,
                                    15610502428869177382u, 14695436038551369680u, 1718617291719999957u};
  for (std::size_t number = 0; number < std::size(shapes); number++)
    CHECK(digest(run<float>(shapes[number], attention_sets().front(), 1)) == expected[number]);
}

TEST_CASE("attention of bfloat16 has the same bits on any processor") {
  const std::uint64_t expected[] = {7102659271571691941u,  8452795460666350695u,  17411171154708775220u,
                                    10151120561572366989u, 11317440917953013756u, 1718617291719999957u};
  for (std::size_t number = 0; number < std::size(shapes); number++)
    CHECK(digest(run<std::uint16_t>(shapes[number], attention_sets().front(), 1)) == expected[number]);
}

TEST_CASE_TEMPLATE("attention stays within its rows, and has the same bits with any instructions and threads", Number,
                   float, std::uint16_t) {
  for (const Shape& shape : shapes) {
    const std::vector<float> expected = run<Number>(shape, attention_sets().back(), 1);
    for (const float x : expected) CHECK(x == x);
    for (const AttentionSet& set : attention_sets())
      for (const unsigned threads : {1u, 3u}) {
        const std::vector<float> found = run<Number>(shape, set, threads);
        CAPTURE(set.name);
        REQUIRE(found.size() == expected.size());
        CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
      }
  }
}

TEST_CASE("products of tiles have the same bits with any instructions") { check_products(0, 8); }

TEST_CASE("products of more tiles have the same bits" * doctest::test_suite("long")) { check_products(8, 80); }

#if defined(SENNIT_X86_KERNELS)
TEST_CASE("reciprocals from 1 to 2^126 have the bits of a division") {
  if (find_attention("avx512") == nullptr) {
    MESSAGE("not tested: this processor has no AVX-512");
    return;
  }
  for (const std::uint32_t exponent : {127, 252}) CHECK(other_reciprocals(exponent) == 0);
}
#endif

TEST_CASE("no attention for a set that is not there") { CHECK(find_attention("no such set") == nullptr); }
