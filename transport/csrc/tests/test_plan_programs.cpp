// SPDX-License-Identifier: Apache-2.0
// Reductions in plans: their programs, and the sizes of partial sums, are checked when a plan is loaded.
#include "engine_group.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

constexpr uint64_t ALLREDUCE = uint64_t{1} << 56;

}  // namespace

TEST_CASE("a program must leave one value, never combine more than there are, and never keep too many") {
  // Operands of one byte range each, with the combinations after each.
  const auto program = [](const std::vector<uint8_t>& combinations) {
    PlanWriter writer(2, 0, 1, ALLREDUCE);
    std::vector<Operand> operands;
    for (const uint8_t count : combinations) operands.push_back(Operand{.combinations = count});
    writer.add(StepKind::reduce, 0, 0, 0, 64, 8, operands);
    return writer;
  };
  CHECK(refusal(program({0, 1, 0, 2})).empty());
  CHECK(refusal(program({0, 2})).find("combines 3 values after operand 1; there are 2") != std::string::npos);
  CHECK(refusal(program({1})).find("combines 2 values after operand 0; there are 1") != std::string::npos);
  CHECK(refusal(program({0, 0, 1})).find("leaves 2 values; needed: 1") != std::string::npos);
  std::vector<uint8_t> deep(MAX_FOLD_DEPTH, 0);
  deep.back() = MAX_FOLD_DEPTH - 1;
  CHECK(refusal(program(deep)).empty());
  deep.insert(deep.begin(), 0);
  CHECK(refusal(program(deep)).find("keeps 34 values; allowed: 33") != std::string::npos);
}

TEST_CASE("partial sums are as wide as the accumulator, in range checks too") {
  const auto reaches = [](uint8_t dtype, uint8_t operand_is_partial, uint8_t flags, uint64_t size_bytes) {
    PlanWriter writer(2, 0, 2, uint64_t{1} << 56);
    const uint32_t step =
        writer.add(StepKind::reduce, 0, 0, 1, 0, size_bytes, {Operand{.is_partial = operand_is_partial}}, flags);
    writer.step(step).dtype = dtype;
    const std::vector<std::byte> bytes = writer.bytes();
    return Plan::decode(bytes.data(), bytes.size())->sizes_of({})->buffer_extents;
  };
  using Extents = std::vector<uint64_t>;
  CHECK(reaches(SENNIT_F16, 0, 0, 8) == Extents{8, 8, 0});
  CHECK(reaches(SENNIT_F16, 1, 0, 8) == Extents{16, 8, 0});
  CHECK(reaches(SENNIT_BF16, 0, STEP_PARTIAL, 8) == Extents{4, 8, 0});
  CHECK(reaches(SENNIT_C32, 1, STEP_PARTIAL, 8) == Extents{8, 8, 0});
  CHECK(reaches(SENNIT_F64, 1, STEP_PARTIAL, 8) == Extents{8, 8, 0});
  CHECK_THROWS_AS(reaches(SENNIT_F16, 0, STEP_PARTIAL, 6), PlanError);
  CHECK_THROWS_AS(reaches(SENNIT_F16, 1, 0, UINT64_MAX - 1), PlanError);
}
