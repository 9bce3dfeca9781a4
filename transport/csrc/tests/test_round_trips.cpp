// SPDX-License-Identifier: Apache-2.0
// Round trips in plans: what is refused, what they compute, and how they end when a rank does.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "messages/mailbox.hpp"
#include "tests/engine_group.hpp"
#include "tests/heap_bytes.hpp"
#include "tests/shm_pair.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

constexpr uint64_t ALLREDUCE = uint64_t{SENNIT_ALLREDUCE} << 56 | uint64_t{SENNIT_F32} << 48 | uint64_t{1} << 46;
constexpr uint64_t P2P = uint64_t{SENNIT_P2P} << 56;
constexpr uint64_t DEADLINE_US = 20'000'000;

// A plan of one loan and the reduction that reads it.
struct LoanPlan {
  uint64_t lent_bytes = 64, reduced_bytes = 64;
  uint8_t loan_flags = STEP_LOAN | STEP_ROUND_TRIP, reduce_flags = STEP_ROUND_TRIP;
  Operand operand{.kind = 1};
  uint64_t signature = ALLREDUCE;

  std::string refusal() const {
    PlanWriter writer(2, 0, 1, signature);
    const uint32_t loan = writer.add(StepKind::receive, 1, 0, 0, 0, lent_bytes, {}, loan_flags);
    const uint32_t fold = writer.add(StepKind::reduce, 0, 0, 0, 0, reduced_bytes, {operand}, reduce_flags);
    writer.edge(loan, fold);
    return ::refusal(writer);
  }
};

// As transport/algorithms/allreduce_round_trip.py, from buffer 0 to buffer `result`.
std::vector<std::byte> allreduce_by_round_trips(uint32_t world, uint32_t rank, uint64_t count, uint32_t result) {
  PlanWriter writer(world, rank, 2, ALLREDUCE | count);
  const auto begin_of = [&](uint32_t share) { return count * share / world * 4; };
  for (uint32_t share = 0; share < world; ++share) {
    uint32_t slot = 0;
    for (uint64_t at = begin_of(share); at < begin_of(share + 1); at += MAX_LOAN_BYTES, ++slot) {
      const uint64_t size_bytes = std::min(MAX_LOAN_BYTES, begin_of(share + 1) - at);
      if (share != rank) {
        const uint32_t send = writer.add(StepKind::send, share, slot, 0, 0, size_bytes,
                                         {Operand{.index = result, .offset = at}}, STEP_ROUND_TRIP);
        if (result == 0) continue;
        writer.edge(writer.add(StepKind::copy, 0, 0, result, at, size_bytes, {Operand{.offset = at}}), send);
        continue;
      }
      std::vector<Operand> operands(world);
      std::vector<uint32_t> loans;
      for (uint32_t peer = 0; peer < world; ++peer) {
        operands[peer] = {.offset = at};
        if (peer != rank) {
          loans.push_back(writer.add(StepKind::receive, peer, slot, 0, 0, size_bytes, {}, STEP_LOAN | STEP_ROUND_TRIP));
          operands[peer] = {.kind = 1, .index = loans.back()};
        }
        operands[peer].combinations =
            static_cast<uint8_t>(peer + 1 == world ? std::popcount(peer) : std::countr_one(peer));
      }
      const uint32_t fold = writer.add(StepKind::reduce, 0, 0, result, at, size_bytes, operands, STEP_ROUND_TRIP);
      for (const uint32_t loan : loans) writer.edge(loan, fold);
    }
  }
  return writer.bytes();
}

Result post(Engine& engine, const LoadedPlan& plan, const Bytes& in, const Bytes& out, uint32_t flags) {
  const sennit_buffer buffers[] = {{in.data(), in.size()}, {out.data(), out.size()}};
  const sennit_post_options options{0, flags, 0, 1.0, nullptr, 0, 0};
  sennit_op* op = nullptr;
  char error[1024] = "";
  Result result;
  result.status =
      sennit_post(reinterpret_cast<sennit_comm*>(&engine), plan.handle, buffers, 2, &options, &op, error, sizeof error);
  result.error = error;
  if (result.status != SENNIT_OK) return result;
  result.status = sennit_wait(op, 0);
  result.error = sennit_op_error(op);
  sennit_op_release(op);
  return result;
}

// What rank `rank` gives in `round`. The sum over three ranks is that of rank 5.
void fill(const Bytes& bytes, uint32_t rank, uint32_t round) {
  auto* const values = reinterpret_cast<float*>(bytes.data());
  for (size_t i = 0; i < bytes.size() / 4; ++i) values[i] = static_cast<float>((rank + 1) * (i % 97 + round));
}

bool is_sum(const Bytes& bytes, uint32_t round) {
  const auto* const values = reinterpret_cast<const float*>(bytes.data());
  bool is = true;
  for (size_t i = 0; i < bytes.size() / 4; ++i) is &= values[i] == static_cast<float>(6 * (i % 97 + round));
  return is;
}

class Recorder final : public MailboxClient {
 public:
  void on_message_sent(uint32_t) override {}
  void on_message_received(uint32_t, uint32_t, const std::byte*, uint64_t) override { ++received; }
  int received = 0;
};

}  // namespace

TEST_CASE("a loan and its reduction make the round trip together, whole and to final results") {
  CHECK(LoanPlan{}.refusal() == "");
  CHECK(LoanPlan{.lent_bytes = MAX_LOAN_BYTES, .reduced_bytes = MAX_LOAN_BYTES}.refusal() == "");
  const std::string both = "step 1 and the loan that it reads must both make the round trip, or neither";
  CHECK(LoanPlan{.loan_flags = STEP_LOAN, .reduce_flags = 0}.refusal() == "");
  CHECK(LoanPlan{.reduce_flags = 0}.refusal().ends_with(both));
  CHECK(LoanPlan{.loan_flags = STEP_LOAN}.refusal().ends_with(both));
  const std::string another = "step 1 sends back another size than it was lent";
  CHECK(LoanPlan{.reduced_bytes = 32}.refusal().ends_with(another));
  CHECK(LoanPlan{.reduced_bytes = 32, .operand = {.kind = 1, .offset = 32}}.refusal().ends_with(another));
  CHECK(LoanPlan{.operand = {.kind = 1, .is_partial = 1}}.refusal().ends_with(another));
  const std::string only = "makes a round trip; only a send, a loan and a reduction to final results may";
  CHECK(LoanPlan{.reduce_flags = STEP_ROUND_TRIP | STEP_PARTIAL}.refusal().ends_with("step 1 " + only));
  CHECK(LoanPlan{.loan_flags = STEP_ROUND_TRIP}.refusal().ends_with("step 0 " + only));
  PlanWriter copy(2, 0, 2, ALLREDUCE);
  copy.add(StepKind::copy, 0, 0, 1, 0, 64, {Operand{}}, STEP_ROUND_TRIP);
  CHECK(refusal(copy).ends_with("step 0 " + only));
  PlanWriter copies_loan(2, 0, 2, ALLREDUCE);
  const uint32_t loan = copies_loan.add(StepKind::receive, 1, 0, 0, 0, 64, {}, STEP_LOAN | STEP_ROUND_TRIP);
  copies_loan.edge(loan, copies_loan.add(StepKind::copy, 0, 0, 1, 0, 64, {Operand{.kind = 1}}));
  CHECK(refusal(copies_loan).ends_with(both));
}

TEST_CASE("what makes a round trip is a loan's size, of a collective in host memory, and not counted") {
  const auto send = [](uint64_t size_bytes, uint64_t signature = ALLREDUCE) {
    PlanWriter writer(2, 0, 1, signature);
    writer.add(StepKind::send, 1, 0, 0, 0, size_bytes, {Operand{}}, STEP_ROUND_TRIP);
    return writer;
  };
  CHECK(refusal(send(1)) == "");
  CHECK(refusal(send(MAX_LOAN_BYTES)) == "");
  CHECK(refusal(send(0)).ends_with("step 0 makes a round trip of 0 bytes; allowed: 1..131072"));
  CHECK(refusal(send(MAX_LOAN_BYTES + 1)).ends_with("step 0 makes a round trip of 131073 bytes; allowed: 1..131072"));
  const std::string never =
      "makes a round trip; a plan on device, a counted size that may be empty or a send/recv must not";
  CHECK(refusal(send(64, P2P)).ends_with(never));
  CHECK(LoanPlan{.signature = P2P}.refusal().ends_with(never));
  CHECK(refusal(send(PlanWriter::counted(0, 1)).takes(1, 4)).ends_with(never));
  PlanWriter on_device(2, 0, 1, ALLREDUCE);
  on_device.uses_device(64).add(StepKind::send, 1, 0, 0, 0, 64, {Operand{.index = 1}}, STEP_ROUND_TRIP);
  CHECK(refusal(on_device).ends_with(never));
}

TEST_CASE("round trips are refused where a rank is not reached over shared memory") {
  const Group group(2, DEADLINE_US, Route::Kind::udp);
  const Bytes in(4'000, true), out(4'000, true);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const LoadedPlan plan(allreduce_by_round_trips(2, rank, 1'000, 1));
    const Result result = post(*group.engines[rank], plan, in, out, 0);
    CHECK(result.status == SENNIT_ARGUMENT);
    CHECK(result.error ==
          "the plan makes round trips, but rank " + std::to_string(1 - rank) + " is not reached over shared memory");
  }
}

TEST_CASE("an allreduce by round trips over three ranks, in all kinds of memory, many sizes, many times") {
  for (const uint64_t count : {1u, 100u, 2'048u, 98'304u, 98'305u, 300'001u}) {
    // The ranks' memory may differ: a bit for each rank.
    for (const uint32_t in_heap : {0b000u, 0b111u, 0b101u}) {
      for (const uint32_t result : {0u, 1u}) {
        run_ranks(3, DEADLINE_US, [&](Engine& engine, uint32_t rank) {
          const LoadedPlan plan(allreduce_by_round_trips(3, rank, count, result));
          const bool is_in_heap = (in_heap >> rank & 1) != 0;
          const Bytes in(count * 4, is_in_heap), out(count * 4, is_in_heap);
          for (uint32_t round = 0; round < 4; ++round) {
            fill(in, rank, round);
            const Result done = post(engine, plan, in, out, round % 2 == 0 ? 0 : SENNIT_POST_ASYNC);
            REQUIRE_MESSAGE(done.status == SENNIT_OK, done.error);
            CHECK(is_sum(result == 0 ? in : out, round));
            CHECK((in.are_guards_whole() && out.are_guards_whole()));
          }
        });
      }
    }
  }
}

TEST_CASE("one rank aborts in the middle: the others fail as well, with its reason, and keep their memory") {
  constexpr uint64_t COUNT = 60'000;
  constexpr std::byte OVER{0xEE};
  for (uint32_t trial = 0; trial < 8; ++trial) {
    CAPTURE(trial);
    const bool is_in_heap = trial % 4 != 3;
    const uint32_t result = trial / 2 % 2;
    std::vector<std::unique_ptr<Bytes>> buffers;
    for (uint32_t i = 0; i < 6; ++i) buffers.push_back(std::make_unique<Bytes>(COUNT * 4, is_in_heap));
    std::atomic<uint32_t> rounds_begun{0};
    std::array<Result, 3> ends;
    run_ranks(3, DEADLINE_US, [&](Engine& engine, uint32_t rank) {
      const LoadedPlan plan(allreduce_by_round_trips(3, rank, COUNT, result));
      Bytes &in = *buffers[2 * rank], &out = *buffers[2 * rank + 1];
      std::thread aborter;
      if (rank == 2)
        aborter = std::thread([&] {
          while (rounds_begun <= trial % 6) std::this_thread::yield();
          for (uint32_t wait = 0; wait < trial * 60; ++wait) std::this_thread::yield();
          engine.abort("out of coffee");
        });
      for (uint32_t round = 0; ends[rank].error.empty(); ++round) {
        fill(in, rank, round);
        if (rank == 2) ++rounds_begun;
        ends[rank] = post(engine, plan, in, out, round % 2 == 0 ? 0 : SENNIT_POST_ASYNC);
        if (ends[rank].status == SENNIT_OK) CHECK(is_sum(result == 0 ? in : out, round));
      }
      // The memory is the caller's own again.
      in.fill_with(OVER);
      out.fill_with(OVER);
      if (aborter.joinable()) aborter.join();
    });
    for (const auto& bytes : buffers) CHECK((bytes->is_all(OVER) && bytes->are_guards_whole()));
    for (const uint32_t rank : {0u, 1u}) {
      CAPTURE(rank);
      CAPTURE(ends[rank].error);
      CHECK(ends[rank].status == SENNIT_PEER);
      CHECK(ends[rank].error.find("rank 2 aborted: out of coffee") != std::string::npos);
    }
    CHECK(ends[2].status != SENNIT_OK);
    CHECK(ends[2].status != SENNIT_TIMEOUT);
  }
}

TEST_CASE("a reduction may read a loan twice and sends it back once") {
  run_ranks(2, DEADLINE_US, [](Engine& engine, uint32_t rank) {
    const Bytes in(4'000, true), out(4'000, true);
    PlanWriter writer(2, rank, 2, ALLREDUCE | 1'000);
    if (rank == 0) {
      writer.add(StepKind::send, 1, 0, 0, 0, 4'000, {Operand{}}, STEP_ROUND_TRIP);
    } else {
      const uint32_t loan = writer.add(StepKind::receive, 0, 0, 0, 0, 4'000, {}, STEP_LOAN | STEP_ROUND_TRIP);
      const std::vector<Operand> twice = {{.kind = 1, .index = loan}, {.kind = 1, .combinations = 1, .index = loan}};
      writer.edge(loan, writer.add(StepKind::reduce, 0, 0, 1, 0, 4'000, twice, STEP_ROUND_TRIP));
    }
    const LoadedPlan plan(writer.bytes());
    for (uint32_t round = 0; round < 3; ++round) {
      fill(in, 2, round);
      const Result done = post(engine, plan, in, out, 0);
      REQUIRE_MESSAGE(done.status == SENNIT_OK, done.error);
      CHECK(is_sum(rank == 0 ? in : out, round));
    }
  });
}

TEST_CASE("a message that should make a round trip, but comes eagerly, ends the group") {
  const MessageHeader header{1 << 20, ALLREDUCE, 64};
  const std::vector<std::byte> data(64);
  for (const bool comes_first : {true, false}) {
    ShmPair pair;
    Mailbox mailbox(0, 2);
    mailbox.set_lane(1, &pair.a.lane(1));
    Recorder client;
    if (comes_first) REQUIRE(mailbox.on_eager(1, header, EAGER_DATA, data.data()));
    mailbox.receive(client, 0, 1, header, nullptr, true);
    if (!comes_first) REQUIRE(mailbox.on_eager(1, header, EAGER_DATA, data.data()));
    CHECK(client.received == 0);
    REQUIRE(mailbox.failure() != nullptr);
    CHECK(mailbox.failure()->kind == MailboxFailure::Kind::peer_lost);
    CHECK(mailbox.failure()->reason == (comes_first ? "sent a message eagerly that must make a round trip"
                                                    : "sent a message eagerly although memory was advertised for it"));
  }
}
