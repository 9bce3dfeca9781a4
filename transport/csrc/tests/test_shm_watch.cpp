// SPDX-License-Identifier: Apache-2.0
// Which inboxes a rank looks into, and that it finds news in those that it does not look into.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

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
  rounds(a, ShmPort::WATCH_ROUNDS);
  rounds(b, 2 * ShmPort::WATCH_ROUNDS);
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
  rounds(a, 2 * ShmPort::WATCH_ROUNDS);
  REQUIRE(rounds(a, 10) == 0);
  CHECK(a.lane(65).send_eager({9, 2, 0}, EAGER_DATA, nullptr));
  CHECK(rounds(a, 10) == 10);
  // The end of a peer is found, however long nobody looked.
  rounds(a, 2 * ShmPort::WATCH_ROUNDS);
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
