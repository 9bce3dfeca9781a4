// SPDX-License-Identifier: Apache-2.0
// Attention with memory that ends where its rows end, so that sanitizers see a step beyond, and with the bits of
// another instruction set. Its values are tested in Python.
#include <doctest/doctest.h>

#include <bit>
#include <cstring>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "attention.hpp"
#include "instruction_sets.hpp"

using namespace sennit::kernels;

namespace {

struct Shape {
  std::vector<std::int64_t> lengths, targets;
  std::size_t heads, dim, width, context;
  std::int64_t window;
  bool is_softmax, is_causal, has_bias;
};

// The output, and all gradients, one after another.
std::vector<float> run(const Shape& shape, const AttentionKernels& kernels, unsigned threads) {
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
  const auto part = [&](std::vector<float>& all, std::size_t dim) {
    return HeadRows{all.data(), shape.heads * dim, dim, dim};
  };
  std::vector<float> query = draw(rows * shape.heads * shape.dim), key = draw(query.size());
  std::vector<float> value = draw(rows * shape.heads * shape.width), arriving = draw(value.size());
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
                      .is_bf16 = false,
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
  std::vector<float> output(value.size()), statistics(rows * shape.heads * 2);
  std::vector<float> of_query(query.size()), of_key(key.size()), of_value(value.size());
  std::vector<float> of_bias((sequences + 1) * shape.heads * attention.bias_entries());
  attend(kernels, attention, {part(output, shape.width), statistics.data()}, threads);
  differentiate(kernels, attention,
                {part(arriving, shape.width), statistics.data(), part(of_query, shape.dim), part(of_key, shape.dim),
                 part(of_value, shape.width), shape.has_bias ? of_bias.data() : nullptr},
                threads);
  for (const auto* more : {&of_query, &of_key, &of_value, &of_bias})
    output.insert(output.end(), more->begin(), more->end());
  return output;
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

// FNV-1a of the bits.
std::uint64_t digest(const std::vector<float>& numbers) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const float x : numbers) {
    hash ^= std::bit_cast<std::uint32_t>(x);
    hash *= 0x100000001b3;
  }
  return hash;
}

}  // namespace

TEST_CASE("attention has the same bits on any processor") {
  const std::uint64_t expected[] = {15499524521834503297u, 6525342788424256247u,  12145360007898683342u,
                                    15610502428869177382u, 14695436038551369680u, 1718617291719999957u};
  for (std::size_t number = 0; number < std::size(shapes); number++)
    CHECK(digest(run(shapes[number], *find_attention(available_kernels().front()->name), 1)) == expected[number]);
}

TEST_CASE("attention stays within its rows, and has the same bits with any instructions and threads") {
  for (const Shape& shape : shapes) {
    const std::vector<float> expected = run(shape, *find_attention("portable"), 1);
    for (const float x : expected) CHECK(x == x);
    for (const Kernels* kernels : available_kernels())
      for (const unsigned threads : {1u, 3u}) {
        const std::vector<float> found = run(shape, *find_attention(kernels->name), threads);
        REQUIRE(found.size() == expected.size());
        CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
      }
  }
}

TEST_CASE("no attention for a set that is not there") { CHECK(find_attention("no such set") == nullptr); }
