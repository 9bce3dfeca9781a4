// SPDX-License-Identifier: Apache-2.0
// Operations whose folds and copies several threads share (SENNIT_THREADS): the same bits.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "reduce/fold.hpp"
#include "tests/engine_group.hpp"

using namespace sennit;
using test::Group;
using test::LoadedPlan;
using test::PlanWriter;

namespace {

constexpr uint32_t WORLD = 5;  // a fold reads enough for three threads
constexpr uint64_t DEADLINE_US = 60'000'000;

std::vector<std::byte> noise(uint64_t size_bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size_bytes);
  for (uint64_t at = 0; at + 8 <= size_bytes; at += 8) {
    const uint64_t value = random();
    std::memcpy(bytes.data() + at, &value, 8);
  }
  return bytes;
}

// Runs the plan on all ranks. Returns their results, one after the other.
std::vector<std::byte> results(const Group& group, const std::function<std::vector<std::byte>(uint32_t)>& plan_of,
                               std::vector<std::vector<std::byte>>& in, uint64_t out_bytes) {
  std::vector<std::byte> out(WORLD * out_bytes);
  std::vector<sennit_status> ended(WORLD, SENNIT_PENDING);
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < WORLD; ++rank)
    ranks.emplace_back([&, rank] {
      const LoadedPlan plan(plan_of(rank));
      const sennit_buffer buffers[] = {{in[rank].data(), in[rank].size()}, {out.data() + rank * out_bytes, out_bytes}};
      const sennit_post_options options{0, 0, 0, 1.5, nullptr, 0, 0};
      sennit_op* op = nullptr;
      ended[rank] = sennit_post(group.comm(rank), plan.handle, buffers, 2, &options, &op, nullptr, 0);
      if (op == nullptr) return;
      ended[rank] = sennit_wait(op, 0);
      sennit_op_release(op);
    });
  for (std::thread& rank : ranks) rank.join();
  CHECK(ended == std::vector<sennit_status>(WORLD, SENNIT_OK));
  return out;
}

// A fold is cut by the size of its elements, whatever it does. Each type and operation by itself: test_fold.cpp.
// Returns how many cases there were. `is_every_type`: not only one of each size.
uint32_t check_folds(bool is_every_type) {
  constexpr uint64_t SIZE_BYTES = 3 * MAX_LOAN_BYTES - 16 * 77;  // the last fold is cut at odd places
  std::vector<std::unique_ptr<Group>> groups;
  for (const uint32_t threads : {1u, 3u})
    groups.push_back(std::make_unique<Group>(WORLD, DEADLINE_US, Route::Kind::shm, threads));
  std::vector<std::vector<std::byte>> in;
  for (uint32_t rank = 0; rank < WORLD; ++rank) in.push_back(noise(SIZE_BYTES, rank));
  uint32_t case_count = 0;
  for (int type = SENNIT_U8; type <= SENNIT_C32; ++type) {
    for (int what = SENNIT_SUM; what <= SENNIT_PREMUL_SUM; ++what) {
      const auto dtype = static_cast<sennit_dtype>(type);
      const auto reduce = static_cast<sennit_reduce>(what);
      if (find_fold(dtype, reduce) == nullptr) continue;
      const bool is_whole = type == SENNIT_F32 || type == SENNIT_U8;  // with all that they can
      if (!is_whole && reduce != SENNIT_SUM && reduce != SENNIT_MAX) continue;
      if (!is_every_type && !is_whole && type != SENNIT_F16 && type != SENNIT_F64 && type != SENNIT_C128) continue;
      ++case_count;
      CAPTURE(type);
      CAPTURE(what);
      const auto plan = [&](uint32_t rank) { return PlanWriter::allreduce(WORLD, rank, SIZE_BYTES, dtype, reduce); };
      const std::vector<std::byte> expected = results(*groups[0], plan, in, SIZE_BYTES);
      for (size_t more = 1; more < groups.size(); ++more)
        REQUIRE(results(*groups[more], plan, in, SIZE_BYTES) == expected);
    }
  }
  return case_count;
}

}  // namespace

TEST_CASE("results have the same bits with 1 and 3 threads, for types of every size, and for every operation") {
  CHECK(check_folds(false) > 12);
}

TEST_CASE("results have the same bits with 1 and 3 threads, for every type" * doctest::test_suite("long")) {
  CHECK(check_folds(true) > 25);
}

TEST_CASE("copies have the same bytes with 1, 2 and 3 threads, streamed or not") {
  for (const uint64_t size_bytes : {1'000'003u, 4'000'037u}) {
    CAPTURE(size_bytes);
    const auto plan = [size_bytes](uint32_t rank) {
      PlanWriter writer(WORLD, rank, 2, uint64_t{SENNIT_ALLGATHER} << 56);
      writer.add(StepKind::copy, 0, 0, 1, 5, size_bytes, {Operand{.offset = 3}});
      return writer.bytes();
    };
    std::vector<std::vector<std::byte>> in;
    for (uint32_t rank = 0; rank < WORLD; ++rank) in.push_back(noise(size_bytes + 8, rank));
    for (const uint32_t threads : {1u, 2u, 3u}) {
      const Group group(WORLD, DEADLINE_US, Route::Kind::shm, threads);
      const std::vector<std::byte> out = results(group, plan, in, size_bytes + 8);
      for (uint32_t rank = 0; rank < WORLD; ++rank) {
        const auto first = out.begin() + static_cast<ptrdiff_t>(rank * (size_bytes + 8));
        CHECK(std::equal(first + 5, first + 5 + static_cast<ptrdiff_t>(size_bytes), in[rank].begin() + 3));
        CHECK(std::count(first, first + 5, std::byte{}) == 5);
      }
    }
  }
}

TEST_CASE("ten groups of one process have the workers of one group") {
  std::vector<Engine*> groups;
  for (int group = 0; group < 10; ++group) groups.push_back(new Engine({0, 1, DEADLINE_US, 0, 1, 1'000'000, 3}));
  CHECK(of_process<ThreadTeam>()->worker_count() == 2);
  for (Engine* group : groups) group->release();
  CHECK(of_process<ThreadTeam>()->worker_count() == 0);  // gone with the last
}

TEST_CASE("a group with a number of threads out of range is refused with the range") {
  for (const uint32_t threads : {0u, 65u})
    CHECK_THROWS_WITH_AS(new Engine({0, 1, DEADLINE_US, 0, 1, 1'000'000, threads}), doctest::Contains("allowed: 1..64"),
                         std::invalid_argument);
}
