// SPDX-License-Identifier: Apache-2.0
// Which inboxes a rank looks into, and that it finds news in those that it does not look into.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "tests/engine_group.hpp"
#include "tests/shm_pair.hpp"

using namespace sennit;

TEST_CASE("a round looks into the inboxes that have news, and an inbox without any costs nothing") {
  constexpr uint32_t WORLD = 66;
  ShmPort a{0, WORLD}, b{65, WORLD};
  ShmPort silent[] = {{5, WORLD}, {64, WORLD}};
  test::ShmSink sink_a, sink_b;
  for (uint32_t peer : {5u, 64u, 65u}) {
    REQUIRE(a.accept(peer, (peer == 65 ? b : silent[peer == 64]).offer()));
    a.connect(peer, sink_a);
  }
  REQUIRE(b.accept(0, a.offer()));
  b.connect(0, sink_b);
  const auto rounds = [](ShmPort& port, uint32_t count) {
    const uint64_t before = port.agenda().visits();
    for (uint32_t round = 0; round < count; ++round) port.progress(1);
    return port.agenda().visits() - before;
  };
  CHECK(rounds(a, 2) == 6);
  rounds(a, WATCH_ROUNDS);
  rounds(b, 2 * WATCH_ROUNDS);
  CHECK(rounds(a, 1'000) == 0);

  // News of one peer: the first round finds it, and only that inbox is looked at from then on.
  for (uint64_t key = 1; key <= 3; ++key) {
    CHECK(b.lane(0).send_eager({key, 2, 0}, EAGER_DATA, nullptr));
    b.progress(1);
    CHECK(rounds(a, 1) == 1);
    CHECK(sink_a.eager.size() == key);
    CHECK(rounds(a, 10) == 10);
  }
  // This side has something to send: it looks for the answer by itself.
  rounds(a, 2 * WATCH_ROUNDS);
  REQUIRE(rounds(a, 10) == 0);
  CHECK(a.lane(65).send_eager({9, 2, 0}, EAGER_DATA, nullptr));
  CHECK(rounds(a, 10) == 10);
  // The end of a peer is found, however long nobody looked.
  rounds(a, 2 * WATCH_ROUNDS);
  REQUIRE(rounds(a, 10) == 0);
  b.abort("rank 65 has had enough");
  a.progress(1);
  REQUIRE(sink_a.lost.size() == 1);
  CHECK(sink_a.lost[0].find("rank 65 has had enough") != std::string::npos);
}

TEST_CASE("news is found whenever the owner of the inbox stops to look") {
  constexpr uint64_t MESSAGE_COUNT = 3'000;
  test::ShmPair pair;
  std::atomic<uint64_t> found{0};
  std::thread owner([&] {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (found.load() < MESSAGE_COUNT && std::chrono::steady_clock::now() < give_up) {
      pair.b.progress(1);
      found.store(pair.sink_b.eager.size());
    }
  });
  std::mt19937 random(7);
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (uint64_t sent = 0; sent < MESSAGE_COUNT && std::chrono::steady_clock::now() < give_up;) {
    // About as long as the owner looks in vain.
    for (uint32_t pause = random() % 40'000; pause-- > 0;) std::atomic_signal_fence(std::memory_order_seq_cst);
    if (pair.a.lane(1).send_eager({sent, 2, 0}, EAGER_DATA, nullptr)) ++sent;
    pair.a.progress(1);
    while (found.load() < sent && std::chrono::steady_clock::now() < give_up) pair.a.progress(1);
  }
  owner.join();
  CHECK(found.load() == MESSAGE_COUNT);
}

TEST_CASE("the last message of an operation reaches a peer that has stopped to look, though no round follows it") {
  constexpr uint32_t WORLD = 3;
  // The rounds below can take tens of seconds under sanitizers on a busy machine, so they and the deadline allow that.
  const test::Group group(WORLD, 200'000'000);
  // A chain: rank 0 tells rank 1, and rank 1 tells rank 2.
  const auto post = [&](uint32_t rank) {
    test::PlanWriter writer(WORLD, rank, 0, uint64_t{SENNIT_BROADCAST} << 56);
    if (rank != 0) writer.add(StepKind::receive, rank - 1, 0, 0, 0, 0);
    if (rank != WORLD - 1) {
      const uint32_t send = writer.add(StepKind::send, rank + 1, 0, 0, 0, 0, {Operand{}});
      if (rank != 0) writer.edge(0, send);
    }
    const test::LoadedPlan plan(writer.bytes());
    const sennit_post_options options{0, 0, 0, 1.0, nullptr, 0, 0};
    sennit_op* op = nullptr;
    REQUIRE(sennit_post(group.comm(rank), plan.handle, nullptr, 0, &options, &op, nullptr, 0) == SENNIT_OK);
    return op;
  };
  sennit_op* const last = post(2);
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (uint32_t round = 0; round < 2 * WATCH_ROUNDS && std::chrono::steady_clock::now() < give_up; ++round)
    CHECK(sennit_wait(last, 1) == SENNIT_PENDING);
  sennit_op* const middle = post(1);
  CHECK(sennit_wait(middle, 1) == SENNIT_PENDING);
  sennit_op* const first = post(0);
  CHECK(sennit_wait(first, 0) == SENNIT_OK);
  CHECK(sennit_wait(middle, 0) == SENNIT_OK);
  // Nobody waits at rank 1 any more.
  CHECK(sennit_wait(last, 60'000'000) == SENNIT_OK);
  for (sennit_op* op : {first, middle, last}) sennit_op_release(op);
}
