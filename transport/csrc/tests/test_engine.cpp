// SPDX-License-Identifier: Apache-2.0
// Engines of several ranks as threads over shared memory: plans, deadlines, mismatches, ends.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <random>
#include <thread>

#include "tests/engine_group.hpp"

using namespace sennit;
using test::LoadedPlan;
using test::PlanWriter;
using test::Result;
using test::run;
using test::run_ranks;

TEST_CASE("an allreduce over three ranks, many sizes, many times") {
  for (uint64_t count : {1u, 100u, 2'048u, 40'000u, 300'000u}) {
    run_ranks(3, 20'000'000, [&](Engine& engine, uint32_t rank) {
      LoadedPlan plan(PlanWriter::allreduce(3, rank, count * 4));
      std::vector<float> in(count), out(count), expected(count);
      for (int round = 0; round < 8; ++round) {
        for (size_t i = 0; i < count; ++i) {
          expected[i] = 6 * static_cast<float>(i % 97 + round);
          in[i] = static_cast<float>(rank + 1) * static_cast<float>(i % 97 + round);
        }
        const Result result = run(engine, plan, in, out, round % 2 == 0 ? 0 : SENNIT_POST_ASYNC);
        REQUIRE_MESSAGE(result.status == SENNIT_OK, result.error);
        CHECK((out == expected));
      }
    });
  }
}

TEST_CASE("operations in flight together, finished by the background thread, call back once") {
  run_ranks(2, 20'000'000, [&](Engine& engine, uint32_t rank) {
    constexpr size_t COUNT = 50'000, OPERATIONS = 12;
    LoadedPlan plan(PlanWriter::allreduce(2, rank, COUNT * 4));
    std::vector<std::vector<float>> in(OPERATIONS, std::vector<float>(COUNT, static_cast<float>(rank + 1)));
    std::vector<std::vector<float>> out(OPERATIONS, std::vector<float>(COUNT));
    std::atomic<uint32_t> called{0};
    std::vector<sennit_op*> operations;
    for (size_t i = 0; i < OPERATIONS; ++i) {
      const sennit_buffer buffers[] = {{in[i].data(), COUNT * 4}, {out[i].data(), COUNT * 4}};
      const sennit_post_options options{0, SENNIT_POST_ASYNC, 0, 1.0, nullptr, 0, 0};
      sennit_op* op = nullptr;
      REQUIRE(sennit_post(reinterpret_cast<sennit_comm*>(&engine), plan.handle, buffers, 2, &options, &op, nullptr,
                          0) == SENNIT_OK);
      sennit_op_on_done(
          op, [](void* counter) { static_cast<std::atomic<uint32_t>*>(counter)->fetch_add(1); }, &called);
      operations.push_back(op);
    }
    const uint64_t deadline_us = clock_us() + 20'000'000;
    while (called != OPERATIONS && clock_us() < deadline_us) std::this_thread::yield();
    CHECK(called == OPERATIONS);
    for (size_t i = 0; i < OPERATIONS; ++i) {
      CHECK(sennit_op_status(operations[i]) == SENNIT_OK);
      CHECK((out[i] == std::vector<float>(COUNT, 3.0f)));
      sennit_op_release(operations[i]);
    }
  });
}

TEST_CASE("several threads of one rank wait for operations of their own") {
  run_ranks(2, 20'000'000, [&](Engine& engine, uint32_t rank) {
    PlanWriter sender(2, rank, 2, uint64_t{9} << 56);
    if (rank == 0) sender.add(StepKind::send, 1, 0, 0, 0, 40'000, {Operand{}});
    if (rank == 1) sender.add(StepKind::receive, 0, 0, 1, 0, 40'000);
    LoadedPlan plan(sender.bytes());
    std::vector<std::thread> threads;
    for (uint32_t tag = 0; tag < 3; ++tag) {
      threads.emplace_back([&, tag] {
        std::vector<float> in(10'000, static_cast<float>(tag)), out(10'000);
        for (int round = 0; round < 30; ++round) {
          const sennit_buffer buffers[] = {{in.data(), 40'000}, {out.data(), 40'000}};
          const sennit_post_options options{0, SENNIT_POST_P2P, tag, 1.0, nullptr, 0, 0};
          sennit_op* op = nullptr;
          REQUIRE(sennit_post(reinterpret_cast<sennit_comm*>(&engine), plan.handle, buffers, 2, &options, &op, nullptr,
                              0) == SENNIT_OK);
          CHECK(sennit_wait(op, 0) == SENNIT_OK);
          sennit_op_release(op);
        }
        if (rank == 1) CHECK((out == in));
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST_CASE("a rank that does not come: the deadline names it, later posts fail at once") {
  run_ranks(2, 100'000, [&](Engine& engine, uint32_t rank) {
    if (rank == 1) return;
    LoadedPlan plan(PlanWriter::allreduce(2, rank, 4'096));
    std::vector<float> in(1'024), out(1'024);
    Result result = run(engine, plan, in, out);
    CHECK(result.status == SENNIT_TIMEOUT);
    CHECK(result.error.find("rank 1") != std::string::npos);
    CHECK(result.error.find("0.1 s") != std::string::npos);
    result = run(engine, plan, in, out);
    CHECK(result.status == SENNIT_TIMEOUT);
  });
}

TEST_CASE("different sizes on two ranks fail on both, with both sizes") {
  std::string errors[2];
  run_ranks(2, 20'000'000, [&](Engine& engine, uint32_t rank) {
    const uint64_t count = rank == 0 ? 1'000 : 1'200;
    LoadedPlan plan(PlanWriter::allreduce(2, rank, count * 4));
    std::vector<float> in(count), out(count);
    const Result result = run(engine, plan, in, out);
    CHECK((result.status == SENNIT_MISMATCH || result.status == SENNIT_PEER));
    errors[rank] = result.error;
  });
  for (const std::string& error : errors) {
    CAPTURE(error);
    CHECK(error.find("1000 elements") != std::string::npos);
    CHECK(error.find("1200 elements") != std::string::npos);
  }
}

TEST_CASE("an abort ends the operations of all ranks and says why") {
  std::string errors[3];
  run_ranks(3, 20'000'000, [&](Engine& engine, uint32_t rank) {
    if (rank == 2) {
      engine.abort("out of coffee");
      return;
    }
    LoadedPlan plan(PlanWriter::allreduce(3, rank, 4'096));
    std::vector<float> in(1'024), out(1'024);
    const Result result = run(engine, plan, in, out);
    CHECK(result.status == SENNIT_PEER);
    errors[rank] = result.error;
  });
  for (int rank : {0, 1}) {
    CAPTURE(errors[rank]);
    CHECK(errors[rank].find("rank 2 aborted: out of coffee") != std::string::npos);
  }
}

TEST_CASE("a rank that leaves early is named") {
  run_ranks(2, 20'000'000, [&](Engine& engine, uint32_t rank) {
    if (rank == 1) {
      engine.shutdown(1'000);
      return;
    }
    LoadedPlan plan(PlanWriter::allreduce(2, rank, 4'096));
    std::vector<float> in(1'024), out(1'024);
    const Result result = run(engine, plan, in, out);
    CHECK(result.status == SENNIT_PEER);
    CHECK(result.error.find("rank 1 left the group") != std::string::npos);
  });
}

TEST_CASE("an operation keeps its deadline when one with a later deadline is posted behind it") {
  run_ranks(2, 60'000'000, [&](Engine& engine, uint32_t rank) {
    if (rank != 0) return;
    PlanWriter receiver(2, 0, 1, uint64_t{9} << 56);
    receiver.add(StepKind::receive, 1, 0, 0, 0, 8);
    LoadedPlan plan(receiver.bytes());
    std::array<uint64_t, 2> memory{};
    std::array<sennit_op*, 2> ops{};
    for (uint32_t i = 0; i < 2; ++i) {
      const sennit_buffer buffer{&memory[i], 8};
      const sennit_post_options options{i == 0 ? 50'000u : 60'000'000u, SENNIT_POST_P2P, i, 1.0, nullptr, 0, 0};
      REQUIRE(sennit_post(reinterpret_cast<sennit_comm*>(&engine), plan.handle, &buffer, 1, &options, &ops[i], nullptr,
                          0) == SENNIT_OK);
    }
    CHECK(sennit_wait(ops[0], 30'000'000) == SENNIT_TIMEOUT);
    for (sennit_op* op : ops) sennit_op_release(op);
  });
}

TEST_CASE("loans that a copy reads are handed back, so that more messages than the ring holds pass through it") {
  constexpr uint32_t COUNT = 12;
  constexpr uint64_t FLOATS = MAX_LOAN_BYTES / 4;
  run_ranks(2, 20'000'000, [&](Engine& engine, uint32_t rank) {
    PlanWriter writer(2, rank, 2, uint64_t{4} << 56);
    for (uint32_t slot = 0; slot < COUNT; ++slot) {
      const uint64_t at = slot * MAX_LOAN_BYTES;
      writer.add(StepKind::send, 1 - rank, slot, 0, 0, MAX_LOAN_BYTES, {Operand{.offset = at}});
      const uint32_t receive = writer.add(StepKind::receive, 1 - rank, slot, 0, 0, MAX_LOAN_BYTES, {}, STEP_LOAN);
      const uint32_t copy =
          writer.add(StepKind::copy, 0, 0, 1, at, MAX_LOAN_BYTES, {Operand{.kind = 1, .index = receive}});
      writer.edge(receive, copy);
    }
    LoadedPlan plan(writer.bytes());
    std::vector<float> in(COUNT * FLOATS), out(COUNT * FLOATS), expected(COUNT * FLOATS);
    for (size_t i = 0; i < in.size(); ++i) {
      in[i] = static_cast<float>(i * 2 + rank);
      expected[i] = static_cast<float>(i * 2 + 1 - rank);
    }
    const Result result = run(engine, plan, in, out);
    REQUIRE_MESSAGE(result.status == SENNIT_OK, result.error);
    CHECK(out == expected);
  });
}

TEST_CASE("all ranks that are gone are blamed, not only the first") {
  std::barrier gone(3);
  run_ranks(3, 20'000'000, [&](Engine& engine, uint32_t rank) {
    if (rank != 0) engine.shutdown(0);
    gone.arrive_and_wait();
    if (rank != 0) return;
    LoadedPlan plan(PlanWriter::allreduce(3, 0, 4'096));
    std::vector<float> in(1'024), out(1'024);
    const Result result = run(engine, plan, in, out);
    CHECK(result.status == SENNIT_PEER);
    CHECK(engine.lost_ranks() == std::vector<uint32_t>{1, 2});
    CHECK(result.error.find("lost in all: ranks 1, 2") != std::string::npos);
  });
}

TEST_CASE("buffers and plans that do not fit are refused before anything is sent") {
  run_ranks(2, 1'000'000, [&](Engine& engine, uint32_t rank) {
    LoadedPlan plan(PlanWriter::allreduce(2, rank, 4'096));
    LoadedPlan foreign(PlanWriter::allreduce(3, rank, 4'096));
    std::vector<float> in(1'024), small(10);
    Result result = run(engine, plan, in, small);
    CHECK(result.status == SENNIT_ARGUMENT);
    CHECK(result.error.find("buffer 1 has 40 bytes, the plan needs 4096") != std::string::npos);
    CHECK(run(engine, foreign, in, in).status == SENNIT_ARGUMENT);
    CHECK(engine.sequence() == 0);
  });
}

TEST_CASE("no damaged plan is accepted silently or crashes the decoder") {
  const std::vector<std::byte> good = PlanWriter::allreduce(3, 1, 300'000);
  for (size_t size = 0; size < good.size(); size += 1 + size / 16)
    CHECK_THROWS_AS(Plan::decode(good.data(), size), PlanError);
  std::mt19937 random(5);
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::byte> bad = good;
    for (uint32_t flips = random() % 4 + 1; flips != 0; --flips) {
      bad[random() % bad.size()] = static_cast<std::byte>(random());
    }
    try {
      Plan::decode(bad.data(), bad.size());
    } catch (const PlanError&) {
    }
  }
  PlanWriter circle(2, 0, 1, 0);
  const uint32_t a = circle.add(StepKind::copy, 0, 0, 0, 0, 8, {Operand{.offset = 8}});
  const uint32_t b = circle.add(StepKind::copy, 0, 0, 0, 8, 8, {Operand{}});
  circle.edge(a, b);
  circle.edge(b, a);
  const std::vector<std::byte> bytes = circle.bytes();
  CHECK_THROWS_WITH_AS(Plan::decode(bytes.data(), bytes.size()), doctest::Contains("circle"), PlanError);
}

TEST_CASE("a plan that breaks a rule of docs/reference/plans.md is refused, and the error names the rule") {
  constexpr uint64_t ALLREDUCE = uint64_t{1} << 56, P2P = uint64_t{9} << 56;
  const auto refusal = [](const PlanWriter& writer) {
    const std::vector<std::byte> bytes = writer.bytes();
    try {
      Plan::decode(bytes.data(), bytes.size());
    } catch (const PlanError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  // A loan of 64 bytes, read from `offset` on, with or without an edge to its reader.
  const auto loan = [](uint64_t size_bytes, uint64_t offset, bool waits, bool is_read) {
    PlanWriter writer(2, 0, 1, ALLREDUCE);
    const uint32_t receive = writer.add(StepKind::receive, 1, 0, 0, 0, size_bytes, {}, STEP_LOAN);
    if (!is_read) return writer;
    const uint32_t copy =
        writer.add(StepKind::copy, 0, 0, 0, 0, 16, {Operand{.kind = 1, .index = receive, .offset = offset}});
    if (waits) writer.edge(receive, copy);
    return writer;
  };
  CHECK(refusal(loan(64, 48, true, true)).empty());
  CHECK(refusal(loan(64, 49, true, true)).find("reads beyond a loan") != std::string::npos);
  CHECK(refusal(loan(64, UINT64_MAX - 8, true, true)).find("reads beyond a loan") != std::string::npos);
  CHECK(refusal(loan(64, 0, false, true)).find("without waiting for it") != std::string::npos);
  CHECK(refusal(loan(64, 0, true, false)).find("nobody reads the loan of step 0") != std::string::npos);
  CHECK(refusal(loan(0, 0, true, true)).find("is a loan of 0 bytes") != std::string::npos);
  CHECK(refusal(loan(MAX_LOAN_BYTES + 1, 0, true, true)).find("is a loan of 131073 bytes") != std::string::npos);

  for (const bool is_same_slot : {false, true}) {
    PlanWriter twice(2, 0, 1, ALLREDUCE);
    twice.add(StepKind::receive, 1, 3, 0, 0, 8);
    twice.add(StepKind::send, 1, 3, 0, 0, 8, {Operand{}});  // the other direction is another message
    twice.add(StepKind::receive, 1, is_same_slot ? 3 : 4, 0, 8, 8);
    CHECK((refusal(twice).find("slot 3 is used twice with peer 1") != std::string::npos) == is_same_slot);
  }
  for (const uint64_t signature : {ALLREDUCE, P2P}) {
    PlanWriter anyone(2, 0, 1, signature);
    anyone.add(StepKind::receive, SENNIT_ANY_PEER, 0, 0, 0, 8);
    CHECK(refusal(anyone).empty() == (signature == P2P));
  }
  CHECK(refusal(PlanWriter(2, 2, 1, ALLREDUCE)).find("rank 2 of 2") != std::string::npos);
}

namespace {

constexpr uint64_t SHORT_PEER_TIMEOUT_US = 500'000;
// Long enough to give up a peer three times.
constexpr uint64_t LONG_WAIT_US = 3 * SHORT_PEER_TIMEOUT_US;
constexpr uint64_t MESSAGE_BYTES = 16;

UdpConfig udp_config() {
  UdpConfig config;
  config.rails = {{"127.0.0.1", 0}};
  return config;
}

// Engines over UDP. The last `frozen` ranks are ports that nobody drives, like processes that do not run.
struct UdpGroup {
  explicit UdpGroup(uint32_t world, uint32_t frozen = 0) {
    std::vector<std::vector<std::byte>> offers;
    for (uint32_t rank = 0; rank < world; ++rank) {
      if (rank < world - frozen) {
        engines.push_back(new Engine({rank, world, 60'000'000, rank, world, SHORT_PEER_TIMEOUT_US}));
        offers.push_back(engines.back()->ports().udp_open(udp_config()));
      } else {
        frozen_ports.push_back(std::make_unique<UdpPort>(rank, world, udp_config()));
      }
    }
    for (Engine* engine : engines) {
      const uint32_t rank = engine->rank();
      engine->connect(test::udp_routes(rank, world, [&](uint32_t peer) {
        return peer < engines.size() ? test::joined(offers[peer], engines[peer]->ports().offer_for(rank))
                                     : test::info_of(*frozen_ports[peer - engines.size()], rank);
      }));
    }
  }
  ~UdpGroup() {
    for (Engine* engine : engines) {
      engine->shutdown(0);
      engine->release();
    }
  }
  std::vector<Engine*> engines;
  std::vector<std::unique_ptr<UdpPort>> frozen_ports;
};

// One message, from or to `peer`.
std::vector<std::byte> message_plan(uint32_t world, uint32_t rank, StepKind kind, uint32_t peer) {
  PlanWriter writer(world, rank, 1, uint64_t{3} << 56);
  std::vector<Operand> operands;
  if (kind == StepKind::send) operands.push_back(Operand{});
  writer.add(kind, peer, 0, 0, 0, MESSAGE_BYTES, operands);
  return writer.bytes();
}

// An operation in flight, with its memory.
struct Posted {
  Posted(Engine& engine, const std::vector<std::byte>& plan_bytes, uint32_t flags = 0)
      : plan(plan_bytes), memory(3 * MESSAGE_BYTES) {
    const sennit_buffer buffer{memory.data(), memory.size()};
    const sennit_post_options options{0, flags, 0, 1.0, nullptr, 0, 0};
    char error[1024] = "";
    REQUIRE_MESSAGE(sennit_post(reinterpret_cast<sennit_comm*>(&engine), plan.handle, &buffer, 1, &options, &op, error,
                                sizeof error) == SENNIT_OK,
                    error);
  }
  ~Posted() { sennit_op_release(op); }
  LoadedPlan plan;
  std::vector<std::byte> memory;
  sennit_op* op = nullptr;
};

}  // namespace

TEST_CASE(
    "a rank that computes for longer than the peer timeout is waited for, over shared memory and over a network") {
  const auto check = [](Engine& waiting, Engine& computing) {
    Posted receive(waiting, message_plan(2, 0, StepKind::receive, 1));
    const sennit_status status = sennit_wait(receive.op, LONG_WAIT_US);
    REQUIRE_MESSAGE(status == SENNIT_PENDING, sennit_op_error(receive.op));
    Posted send(computing, message_plan(2, 1, StepKind::send, 0));
    CHECK(sennit_wait(receive.op, 0) == SENNIT_OK);
    CHECK(sennit_wait(send.op, 0) == SENNIT_OK);
  };
  SUBCASE("udp") {
    UdpGroup group(2);
    check(*group.engines[0], *group.engines[1]);
  }
  SUBCASE("shm") {
    std::vector<Engine*> engines;
    for (uint32_t rank = 0; rank < 2; ++rank)
      engines.push_back(new Engine({rank, 2, 60'000'000, rank, 2, SHORT_PEER_TIMEOUT_US}));
    const std::vector<std::byte> offers[] = {engines[0]->ports().shm_offer(), engines[1]->ports().shm_offer()};
    for (uint32_t rank = 0; rank < 2; ++rank) REQUIRE(engines[rank]->ports().shm_accept(1 - rank, offers[1 - rank]));
    for (uint32_t rank = 0; rank < 2; ++rank) {
      std::vector<Route> routes(2, {Route::Kind::shm, {}});
      routes[rank].kind = Route::Kind::self;
      engines[rank]->connect(routes);
    }
    check(*engines[0], *engines[1]);
    for (Engine* engine : engines) {
      engine->shutdown(0);
      engine->release();
    }
  }
}

TEST_CASE("a rank whose driver is in a callback for longer than the peer timeout is waited for") {
  UdpGroup group(2);
  Engine &waiting = *group.engines[0], &busy = *group.engines[1];
  struct Gate {
    std::atomic<bool> is_entered{false}, is_open{false};
  };
  static Gate gate;  // The callback may still look at it when this test has ended.
  {
    Posted receive(busy, message_plan(2, 1, StepKind::receive, 0), SENNIT_POST_ASYNC);
    sennit_op_on_done(
        receive.op,
        [](void* argument) {
          auto* const it = static_cast<Gate*>(argument);
          it->is_entered = true;
          it->is_entered.notify_all();
          it->is_open.wait(false);
        },
        &gate);
    Posted send(waiting, message_plan(2, 0, StepKind::send, 1));
    CHECK(sennit_wait(send.op, 0) == SENNIT_OK);
    gate.is_entered.wait(false);
  }
  Posted receive(waiting, message_plan(2, 0, StepKind::receive, 1));
  const sennit_status status = sennit_wait(receive.op, LONG_WAIT_US);
  gate.is_open = true;
  gate.is_open.notify_all();
  REQUIRE_MESSAGE(status == SENNIT_PENDING, sennit_op_error(receive.op));
  Posted send(busy, message_plan(2, 1, StepKind::send, 0));
  CHECK(sennit_wait(receive.op, 0) == SENNIT_OK);
}

TEST_CASE("a process that does not run is named, also by ranks that wait for it through another rank") {
  UdpGroup group(3, 1);
  Posted first(*group.engines[0], message_plan(3, 0, StepKind::receive, 1));
  Posted second(*group.engines[1], message_plan(3, 1, StepKind::receive, 2));
  std::thread other([&] { CHECK(sennit_wait(second.op, 0) == SENNIT_PEER); });
  CHECK(sennit_wait(first.op, 0) == SENNIT_PEER);
  other.join();
  for (const auto& [op, engine] : {std::pair{first.op, group.engines[0]}, std::pair{second.op, group.engines[1]}}) {
    const std::string error = sennit_op_error(op);
    CAPTURE(error);
    CHECK(error.find("rank 2 gave no sign of life for ") != std::string::npos);
    CHECK(error.find("operation 1 of the group") != std::string::npos);
    CHECK(error.find("over its only path") != std::string::npos);
    CHECK(error.find("never heard from") != std::string::npos);
    CHECK(engine->lost_ranks() == std::vector<uint32_t>{2});
  }
}

TEST_CASE("all ranks of a host that falls silent are named") {
  UdpGroup group(4, 2);
  PlanWriter writer(4, 0, 1, uint64_t{3} << 56);
  for (uint32_t peer = 1; peer < 4; ++peer)
    writer.add(StepKind::receive, peer, peer, 0, (peer - 1) * MESSAGE_BYTES, MESSAGE_BYTES);
  Posted receive(*group.engines[0], writer.bytes());
  CHECK(sennit_wait(receive.op, 0) == SENNIT_PEER);
  CHECK(group.engines[0]->lost_ranks() == std::vector<uint32_t>{2, 3});
}

TEST_CASE("a rank that left is named by one that waits for a message of it, over a network too") {
  UdpGroup group(2);
  group.engines[1]->shutdown(1'000'000);
  Posted receive(*group.engines[0], message_plan(2, 0, StepKind::receive, 1));
  CHECK(sennit_wait(receive.op, 0) == SENNIT_PEER);
  const std::string error = sennit_op_error(receive.op);
  CHECK_MESSAGE(error.find("rank 1 left the group") != std::string::npos, error);
}
