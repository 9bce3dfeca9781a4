// SPDX-License-Identifier: Apache-2.0
// Every instruction set on memory of exactly the right size, under sanitizers: no byte outside of rows, states and
// results is read or written, and all sets produce the same bits. Tests in tests/runtime check the bits themselves.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "digest.hpp"
#include "instruction_sets.hpp"
#include "operator.hpp"

using namespace sennit::kernels;

namespace {

struct Shape {
  std::size_t dim;
  Precision precision;
  Pooling pooling;
  bool is_weighted;
  Optimizer optimizer;
};

std::vector<std::byte> bytes_of(const std::vector<float>& floats) {
  std::vector<std::byte> bytes(floats.size() * sizeof(float));
  std::memcpy(bytes.data(), floats.data(), bytes.size());
  return bytes;
}

// The memory after three steps.
std::vector<std::byte> run(const Kernels& kernels, const Shape& shape) {
  constexpr std::uint32_t row_count = 7;
  std::mt19937 random(static_cast<unsigned>(shape.dim));
  std::uniform_real_distribution<float> numbers(-1, 1);
  std::vector<float> first(row_count * shape.dim, 0.5f), second(row_count * shape.dim, 0.25f);
  std::vector<float> wide(row_count * shape.dim);
  std::vector<std::uint16_t> narrow(row_count * shape.dim);
  for (float& x : wide) x = numbers(random);
  for (std::uint16_t& x : narrow) x = static_cast<std::uint16_t>(0x3800 + random() % 0x300);
  const bool is_wide = shape.precision == Precision::fp32;
  auto* weight = is_wide ? reinterpret_cast<std::byte*>(wide.data()) : reinterpret_cast<std::byte*>(narrow.data());

  Operator op(kernels, shape.optimizer);
  op.add({weight,
          row_count,
          static_cast<std::uint32_t>(shape.dim),
          shape.precision,
          0,
          99,
          {first.data(), second.data()}});
  // Runs of more than two chunks, an empty bag, and an ignored id.
  const std::vector<std::int32_t> lengths{90, 0, 5, 1};
  std::vector<std::int64_t> values(96);
  std::vector<std::byte> left;
  for (std::uint32_t number = 1; number <= 3; number++) {
    for (std::int64_t& id : values) id = random() % 3 ? 2 : random() % row_count;
    values[91] = -1;
    std::vector<float> weights(values.size());
    for (float& x : weights) x = numbers(random);
    const Batch batch{
        {lengths.data(), false}, {values.data(), true}, shape.is_weighted ? weights.data() : nullptr, shape.pooling};
    const auto blocks = op.blocks(batch, {0, 0}, {1, 3});
    const std::size_t vectors = shape.pooling == Pooling::none ? values.size() : lengths.size();
    std::vector<float> result(vectors * shape.dim), gradient(result.size()), dots(values.size());
    op.lookup(batch, blocks, result.data());
    for (float& x : gradient) x = numbers(random);
    if (shape.is_weighted) op.weight_gradient(batch, blocks, gradient.data(), dots.data());
    const Step step{0.1f,   0.2f, 1.5f, 1e-8f, 0.9f,  0.1f, 0.99f, 0.01f,  0.01f,
                    0.999f, 3.0f, 2.0f, 0.3f,  false, true, true,  number, 12345};
    CHECK(op.update(batch, blocks, gradient.data(), step).empty());
    for (const auto& part : {bytes_of(result), bytes_of(dots)}) left.insert(left.end(), part.begin(), part.end());
  }
  for (const auto& part : {bytes_of(wide), bytes_of(first), bytes_of(second)})
    left.insert(left.end(), part.begin(), part.end());
  const auto* halves = reinterpret_cast<const std::byte*>(narrow.data());
  left.insert(left.end(), halves, halves + narrow.size() * sizeof(std::uint16_t));
  return left;
}

}  // namespace

TEST_CASE("every instruction set makes the bits of the portable kernels, and every processor makes the same") {
  const Kernels* portable = find_kernels("portable");
  REQUIRE(portable != nullptr);
  sennit::tests::Digest digest;
  for (const Kernels* kernels : available_kernels()) {
    CAPTURE(kernels->name);
    for (const std::size_t dim : {1, 3, 16, 20, 33, 64, 130, 257})
      for (const Precision precision : {Precision::fp32, Precision::fp16, Precision::bf16})
        for (const Pooling pooling : {Pooling::sum, Pooling::mean, Pooling::none})
          for (const bool is_weighted : {false, true}) {
            if (is_weighted && pooling != Pooling::sum) continue;
            const auto optimizer = static_cast<Optimizer>((dim + static_cast<std::size_t>(precision)) % 7);
            const Shape shape{dim, precision, pooling, is_weighted, optimizer};
            const std::vector<std::byte> expected = run(*portable, shape);
            CHECK(run(*kernels, shape) == expected);
            if (kernels == available_kernels()[0]) digest.add(expected);
          }
  }
  // The same on x86-64 and in QEMU (make cross).
  CHECK(digest.value() == 0xB483BA0DC14B0A68u);
}

TEST_CASE("a row whose gradient is not finite is reported and stays as it was") {
  for (const Kernels* kernels : available_kernels()) {
    std::vector<float> weight(5 * 20, 1.0f), gradient(3 * 20, 1.0f);
    gradient[20 + 19] = __builtin_inff();
    Operator op(*kernels, Optimizer::sgd);
    op.add({reinterpret_cast<std::byte*>(weight.data()), 5, 20, Precision::fp32, 0, 0, {nullptr, nullptr}});
    const std::vector<std::int32_t> lengths{1, 2, 1}, values{0, 4, 3, 1};
    const Batch batch{{lengths.data(), false}, {values.data(), false}, nullptr, Pooling::sum};
    Step step{};
    step.rate = 0.5f;
    step.keep = 1;
    step.max_gradient = step.max_norm = __builtin_inff();
    const auto bad = op.update(batch, op.blocks(batch, {0}, {3}), gradient.data(), step);
    REQUIRE(bad.size() == 1);
    CHECK(bad[0].row_count == 2);
    CHECK(bad[0].first_row == 3);
    CHECK(weight[0] == 0.5f);
    CHECK(weight[20] == 0.5f);
    CHECK(weight[3 * 20] == 1.0f);
    CHECK(weight[4 * 20 + 19] == 1.0f);
  }
}

TEST_CASE("scratch is at most 24 bytes a lookup, beside one vector a level") {
  std::vector<float> weight(100'000 * 4);
  std::vector<std::int32_t> lengths(20'000, 1), values(20'000);
  std::mt19937 random(7);
  for (std::int32_t& id : values) id = static_cast<std::int32_t>(random() % 100'000);
  std::vector<float> gradient(20'000 * 4, 1.0f), weights(20'000, 1.0f);
  Operator op(*available_kernels()[0], Optimizer::sgd);
  op.add({reinterpret_cast<std::byte*>(weight.data()), 100'000, 4, Precision::fp32, 0, 0, {nullptr, nullptr}});
  const Batch batch{{lengths.data(), false}, {values.data(), false}, weights.data(), Pooling::sum};
  Step step{};
  step.rate = 0.5f;
  step.keep = 1;
  step.max_gradient = step.max_norm = __builtin_inff();
  op.update(batch, op.blocks(batch, {0, 0}, {5'000, 15'000}), gradient.data(), step);
  const std::size_t vectors = sum_count(values.size(), false) * sum_stride(4) * sizeof(float);
  CHECK(op.scratch_bytes() > 0);
  CHECK(op.scratch_bytes() <= 24 * values.size() + vectors + 5 * 64);
}

TEST_CASE("an id out of range is found wherever it is") {
  for (const Kernels* kernels : available_kernels()) {
    for (const std::size_t count : {1, 2, 15, 16, 17, 100}) {
      std::vector<std::int32_t> narrow(count, 9);
      std::vector<std::int64_t> wide(count, 9);
      CHECK(kernels->in_range({narrow.data(), false}, 0, count, 10));
      CHECK(kernels->in_range({wide.data(), true}, 0, count, 10));
      for (std::size_t place = 0; place < count; place++)
        for (const std::int32_t id : {-1, 10, INT32_MAX, INT32_MIN}) {
          narrow[place] = id;
          wide[place] = id;
          CHECK(!kernels->in_range({narrow.data(), false}, 0, count, 10));
          CHECK(!kernels->in_range({wide.data(), true}, 0, count, 10));
          CHECK(!kernels->in_range({narrow.data(), false}, 0, count, 0xffffffffu) == (id < 0));
          CHECK(kernels->in_range({wide.data(), true}, place + 1, count - place - 1, 10));
          narrow[place] = 9;
          wide[place] = 9;
        }
    }
    CHECK(kernels->in_range({nullptr, true}, 0, 0, 0));
  }
}

TEST_CASE("lengths have to count the ids") {
  const std::vector<std::int64_t> values{0, 1, 2, 3, 4};
  const auto sound = [&](std::vector<std::int64_t> lengths, std::size_t count) {
    return is_sound({{lengths.data(), true}, {values.data(), true}, nullptr, Pooling::sum}, {5, 5}, {1, 2}, count);
  };
  CHECK(sound({2, 3, 0}, 5));
  CHECK(!sound({2, 3, 0}, 4));
  CHECK(!sound({2, 2, 0}, 5));
  CHECK(!sound({2, -1, 4}, 5));
  CHECK(!sound({2, INT64_MAX, INT64_MIN}, 5));
  CHECK(!sound({-1, 3, 3}, 5));
}
