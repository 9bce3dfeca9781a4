// SPDX-License-Identifier: Apache-2.0
// Plans that take counts: any counts in one plan, damaged plans and hostile counts.
#include <doctest/doctest.h>

#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine_group.hpp"
#include "executor/plan_coding.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

constexpr uint32_t WORLD = 3;
constexpr uint64_t TIMEOUT_US = 60'000'000;
using Counts = std::vector<uint64_t>;

// What rank `from` gives to rank `to`.
uint8_t mark(uint32_t from, uint32_t to) { return static_cast<uint8_t>(1 + from * WORLD + to); }

Result run_alltoall(Engine& engine, const LoadedPlan& plan, const Counts& counts, std::vector<uint8_t>& in,
                    std::vector<uint8_t>& out) {
  const sennit_buffer buffers[] = {{in.data(), in.size()}, {out.data(), out.size()}};
  const sennit_post_options options{0, 0, 0, 1.0, counts.data(), static_cast<uint32_t>(counts.size()), 0};
  sennit_op* op = nullptr;
  char error[1024] = "";
  auto* comm = reinterpret_cast<sennit_comm*>(&engine);
  Result result;
  result.status = sennit_post(comm, plan.handle, buffers, 2, &options, &op, error, sizeof error);
  result.error = error;
  if (result.status != SENNIT_OK) return result;
  result.status = sennit_wait(op, 0);
  result.error = sennit_op_error(op);
  sennit_op_release(op);
  return result;
}

}  // namespace

TEST_CASE("one alltoall plan serves any counts, also parts that are copied in several pieces") {
  run_ranks(WORLD, TIMEOUT_US, [](Engine& engine, uint32_t rank) {
    const LoadedPlan plan(PlanWriter::alltoall(WORLD, rank, 1));
    std::mt19937 random(7);  // the same table on all ranks
    for (int round = 0; round < 40; ++round) {
      uint64_t table[WORLD][WORLD];
      constexpr uint64_t LARGEST[] = {0, 50, 5'000, 300'000, 900'000};
      for (auto& row : table)
        for (uint64_t& count : row) count = random() % (LARGEST[random() % std::size(LARGEST)] + 1);
      Counts counts;
      std::vector<uint8_t> in, expected;
      for (uint32_t to = 0; to < WORLD; ++to) {
        counts.push_back(table[rank][to]);
        in.insert(in.end(), table[rank][to], mark(rank, to));
      }
      for (uint32_t from = 0; from < WORLD; ++from) {
        counts.push_back(table[from][rank]);
        expected.insert(expected.end(), table[from][rank], mark(from, rank));
      }
      std::vector<uint8_t> out(expected.size());
      const Result result = run_alltoall(engine, plan, counts, in, out);
      REQUIRE_MESSAGE(result.status == SENNIT_OK, result.error);
      CHECK(out == expected);
    }
  });
}

TEST_CASE("counts that do not fit the plan or the buffers are refused before anything is sent") {
  run_ranks(2, TIMEOUT_US, [](Engine& engine, uint32_t rank) {
    const LoadedPlan plan(PlanWriter::alltoall(2, rank, 4));
    std::vector<uint8_t> in(40), out(40);
    const auto refusal = [&](const Counts& counts) {
      const Result result = run_alltoall(engine, plan, counts, in, out);
      CHECK(result.status == SENNIT_ARGUMENT);
      return result.error;
    };
    CHECK(refusal({1, 2, 3}) == "the plan takes 4 counts, 3 given");
    CHECK(refusal({}) == "the plan takes 4 counts, 0 given");
    CHECK(refusal({5, UINT64_MAX, 5, 5}).find("count 1 is -1; allowed: 0..") == 0);
    CHECK(refusal({uint64_t{1} << 61, 1, 1, 1}).find("count 0 is 2305843009213693952; allowed: 0..") == 0);
    CHECK(refusal({uint64_t{1} << 60, uint64_t{1} << 60, 1, 1}).find("count 1 is 1152921504606846976") == 0);
    CHECK(refusal({6, 6, 6, 6}).find("buffer 0 has 40 bytes, the plan needs 48") == 0);
    CHECK(refusal({5, 5, 5, 6}).find(rank == 0 ? "buffer 1 has 40 bytes, the plan needs 44" : "step 1 moves 24") == 0);
    CHECK(engine.sequence() == 0);
  });
}

// Every range that a run reads or writes lies within what measure() says it touches.
static void check_ranges(const Plan& plan, const RunSizes& sizes) {
  const auto check = [&](uint32_t buffer, uint64_t offset, uint64_t size_bytes) {
    const uint64_t begin = sizes.bytes(offset);
    REQUIRE(begin + size_bytes >= begin);
    if (size_bytes != 0) REQUIRE(begin + size_bytes <= sizes.buffer_extents.at(buffer));
  };
  for (const Step& step : plan.steps) {
    const uint64_t size_bytes = sizes.bytes(step.size_bytes);
    const bool loan = step.kind == StepKind::receive && (step.flags & STEP_LOAN) != 0;
    if (loan) REQUIRE(size_bytes <= MAX_LOAN_BYTES);
    const bool encodes = step.kind == StepKind::encode, decodes = step.kind == StepKind::decode;
    if (encodes || decodes || step.kind == StepKind::reduce)
      REQUIRE(size_bytes % element_size_bytes(static_cast<sennit_dtype>(step.dtype)) == 0);
    const uint64_t coded = encodes || decodes ? coded_bytes(step, size_bytes) : 0;
    if (step.kind != StepKind::send && !loan)
      check(step.destination_buffer, step.destination_offset, encodes ? coded : size_bytes);
    const auto check_length = [&](uint32_t buffer, uint64_t offset) {
      REQUIRE(sizes.bytes(offset) >= LENGTH_BYTES);
      REQUIRE(sizes.bytes(offset) <= sizes.buffer_extents.at(buffer));
    };
    if (is_sized(step) && step.kind != StepKind::send && !decodes)
      check_length(step.destination_buffer, step.destination_offset);
    for (uint32_t o = 0; o < step.operand_count; ++o) {
      const Operand& operand = plan.operands[step.operand_first + o];
      const bool is_length_before = is_sized(step) && !encodes && operand.kind == 0;
      if (is_length_before) check_length(operand.index, operand.offset);
      if (operand.kind == 0) check(operand.index, operand.offset, decodes ? coded : size_bytes);
      if (operand.kind == 1 && decodes) REQUIRE(coded <= sizes.bytes(plan.steps[operand.index].size_bytes));
    }
  }
}

// As transport/algorithms/reduce_scatter_counted.py, in one piece: rank 1's part of it that folds.
static std::vector<std::byte> counted_fold() {
  PlanWriter writer(WORLD, 1, 2, uint64_t{SENNIT_REDUCE_SCATTER} << 56);
  writer.takes(WORLD, 4);
  const uint64_t share = PlanWriter::counted(1, 2);
  const uint32_t after = writer.add(StepKind::receive, 0, 0, 0, 0, share, {}, STEP_LOAN);
  const uint32_t before = writer.add(StepKind::receive, 2, 0, 0, 0, share, {}, STEP_LOAN);
  const Operand own{.combinations = 1, .offset = PlanWriter::counted(0, 1)};
  const uint32_t fold = writer.add(StepKind::reduce, 0, 0, 1, PlanWriter::counted(1, 1), share,
                                   {{.kind = 1, .index = after}, own, {.kind = 1, .combinations = 1, .index = before}});
  writer.edge(after, fold);
  writer.edge(before, fold);
  return writer.bytes();
}

// As transport/algorithms/exchange_coded.py, between two ranks, one part each way: elements, lengths and codes.
static std::vector<std::byte> counted_codes(CodecKind kind, uint32_t block) {
  PlanWriter writer(2, 1, 2,
                    uint64_t{SENNIT_ALLTOALL} << 56 | uint64_t{1} << 44 | static_cast<uint64_t>(kind) | block << 4);
  writer.takes(6, 1).uses_scratch(PlanWriter::counted(2, 6));
  const auto counted = PlanWriter::counted;
  const uint8_t sized = kind == CodecKind::lossless ? STEP_SIZED : 0;
  const Operand index{.kind = 3, .offset = counted(0, 0)};
  const uint32_t encode =
      writer.add(StepKind::encode, 0, block, 2, counted(2, 3), counted(0, 1), {{.offset = counted(0, 0)}, index});
  const uint32_t send =
      writer.add(StepKind::send, 0, 0, 0, 0, counted(3, 4), {{.index = 2, .offset = counted(2, 3)}}, sized);
  const uint32_t come = writer.add(StepKind::receive, 0, 0, 2, counted(2, 5), counted(5, 6), {}, sized);
  const uint32_t decode =
      writer.add(StepKind::decode, 0, block, 1, counted(1, 1), counted(1, 2), {{.index = 2, .offset = counted(2, 5)}});
  writer.step(encode).reduce = writer.step(decode).reduce = static_cast<uint8_t>(kind);
  writer.edge(encode, send);
  writer.edge(come, decode);
  return writer.bytes();
}

TEST_CASE("damaged plans and hostile counts are refused, or stay within the ranges that are checked") {
  std::vector<std::byte> good = PlanWriter::alltoall(WORLD, 1, 8);
  constexpr size_t FLAGS = 48;
  SUBCASE("an alltoall") {}
  SUBCASE("of equal parts") { good[FLAGS] = std::byte{2}; }
  SUBCASE("a fold") { good = counted_fold(); }
  std::optional<CodecSpec> codec;
  SUBCASE("codes") { codec = {CodecKind::int8, 64, false, 0}; }
  SUBCASE("codes without fixed size") { codec = {CodecKind::lossless, 0, false, 0}; }
  if (codec) good = counted_codes(codec->kind, codec->block);
  std::mt19937_64 random(11);
  uint64_t accepted = 0;
  for (int round = 0; round < 5'000; ++round) {
    std::vector<std::byte> bytes = good;
    for (uint64_t flips = random() % 4; flips != 0; --flips)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    Counts counts(2 * WORLD);
    for (uint64_t& count : counts) count = random() >> (random() % 64);
    counts[WORLD + 1] = counts[1];
    for (const uint32_t part : {0u, 1u}) {
      if (!codec || random() % 8 == 0) continue;  // then they do not fit
      counts[part] = random() % 1'000'000 * 4;
      counts[2 + 2 * part] = LENGTH_BYTES;
      counts[3 + 2 * part] = coded_bytes(*codec, SENNIT_F32, counts[part] / 4);
    }
    try {
      const std::unique_ptr<Plan> plan = Plan::decode(bytes.data(), bytes.size());
      counts.resize(std::min<uint64_t>(plan->posted_counts(), 4 * WORLD));
      check_ranges(*plan, *plan->sizes_of(counts));
      ++accepted;
    } catch (const PlanError&) {
    }
  }
  CHECK(accepted > 250);
}
