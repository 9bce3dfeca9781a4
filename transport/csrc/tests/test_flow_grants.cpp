// SPDX-License-Identifier: Apache-2.0
// The grants of a receiver: incast, slow senders that keep their grants, and the budget's bookkeeping.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>

#include "flow/receive_budget.hpp"
#include "sim_peer.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

constexpr uint32_t PACKET_BYTES = 4'096;
constexpr size_t SENDERS = 7;
// 40 us of way and a queue of 300 us.
constexpr uint64_t FIRST_ROUND_TRIP_US = 340;

// Several senders to one receiver, whose last hop is a rate-limited port with a short queue.
struct Incast {
  static constexpr uint64_t RATE_BYTES_PER_S = 1'000'000'000;

  Incast(uint64_t seed, std::string_view congestion, uint64_t ecn_threshold_bytes,
         const std::vector<uint64_t>& sizes_bytes, flow::ReceiveBudget* budget,
         uint64_t rate_bytes_per_s = RATE_BYTES_PER_S)
      : network(seed), finished_us(sizes_bytes.size(), 0) {
    const uint32_t shared = network.add_link({.delay_us = 20,
                                              .rate_bytes_per_s = rate_bytes_per_s,
                                              .queue_limit_bytes = 300'000,
                                              .ecn_threshold_bytes = ecn_threshold_bytes});
    const uint32_t back = network.add_link({.delay_us = 20});
    for (size_t i = 0; i < sizes_bytes.size(); ++i) {
      flow::FlowConfig config{.window_bytes = 2 << 20, .congestion = congestion};
      SimPeer& sender = *senders.emplace_back(std::make_unique<SimPeer>(config));
      config.receive_budget = budget;
      SimPeer& receiver = *receivers.emplace_back(std::make_unique<SimPeer>(config));
      SimPeer::introduce(sender, receiver);
      sender.will_send(bulk(1, sizes_bytes[i]));
      receiver.will_receive(bulk(1, sizes_bytes[i]));
      network.connect(
          sender.flow(), receiver.flow(), std::array{shared}, std::array{back},
          [&sender](uint64_t now_us) { sender.progress(now_us); },
          [this, &receiver, i](uint64_t now_us) {
            receiver.progress(now_us);
            if (receiver.done() && finished_us[i] == 0) finished_us[i] = now_us;
          });
    }
  }
  // Runs until `is_over`, or until everything arrived and is acknowledged. False: neither within ten seconds.
  bool run(const std::function<bool()>& is_over = [] { return false; }) {
    const auto is_done = [](const auto& peer) { return peer->done(); };
    return network.run(10 * SECOND_US, [&] {
      if (network.counters().queue_drops != drops) {
        drops = network.counters().queue_drops;
        last_drop_us = network.now_us();
      }
      return is_over() || (std::ranges::all_of(senders, is_done) && std::ranges::all_of(receivers, is_done));
    });
  }

  SimNetwork network;
  std::vector<std::unique_ptr<SimPeer>> senders, receivers;
  std::vector<uint64_t> finished_us;  // by sender
  uint64_t drops = 0, last_drop_us = 0;
};

void check_incast(uint64_t seed, std::string_view congestion, uint64_t ecn_threshold_bytes, uint64_t size_bytes) {
  CAPTURE(congestion);
  CAPTURE(ecn_threshold_bytes);
  CAPTURE(size_bytes);
  CAPTURE(seed);
  flow::ReceiveBudget budget;
  Incast incast(seed, congestion, ecn_threshold_bytes, std::vector(SENDERS, size_bytes), &budget);
  REQUIRE(incast.run());
  std::ranges::sort(incast.finished_us);
  CHECK(incast.last_drop_us < FIRST_ROUND_TRIP_US);
  CHECK(incast.finished_us.back() * 2 <= incast.finished_us[SENDERS / 2] * 3);
  // Nor is the port ever idle for long.
  const uint64_t ideal_us = SENDERS * size_bytes * SECOND_US / Incast::RATE_BYTES_PER_S;
  CHECK(incast.finished_us.back() < ideal_us * 115 / 100);
  CHECK(budget.granted_bytes() == 0);
  CHECK(budget.expecting_flows() == 0);
  uint64_t marked = 0;
  for (const auto& receiver : incast.receivers) marked += receiver->flow().counters().np_ecn_marked_roce_packets;
  CHECK((marked != 0) == (ecn_threshold_bytes != 0));
}

}  // namespace

TEST_CASE("Incast of 7 to 1: no drop after the first round trip, and all finish together") {
  for (const std::string_view congestion : {"fixed", "swift"})
    for (const uint64_t ecn_threshold_bytes : {0u, 60'000u}) check_incast(1, congestion, ecn_threshold_bytes, 1 << 20);
}

TEST_CASE("Incast of 7 to 1, for longer" * doctest::test_suite("long")) {
  for (const std::string_view congestion : {"fixed", "swift"})
    for (const uint64_t ecn_threshold_bytes : {0u, 60'000u})
      for (uint64_t seed = 1; seed <= 2; ++seed) check_incast(seed, congestion, ecn_threshold_bytes, 4 << 20);
}

TEST_CASE(
    "Incast through a slow port: who waits behind the others in its queue for milliseconds is not taken for idle") {
  flow::ReceiveBudget budget({.min_bytes = 65'536, .target_queue_us = 250});
  Incast incast(1, "fixed", 0, std::vector<uint64_t>(SENDERS, 1 << 20), &budget, Incast::RATE_BYTES_PER_S / 8);
  REQUIRE(incast.run());
  CHECK(incast.last_drop_us < FIRST_ROUND_TRIP_US);
}

TEST_CASE("Without a budget the same incast drops and goes on dropping") {
  Incast incast(1, "fixed", 0, std::vector<uint64_t>(SENDERS, 1 << 20), nullptr);
  REQUIRE(incast.run());
  CHECK(incast.drops > 1'000);
  CHECK(incast.last_drop_us > 1'000);
}

TEST_CASE("One sender is not slowed down by the budget") {
  uint64_t took_us[2];
  for (const bool is_limited : {false, true}) {
    flow::ReceiveBudget budget;
    const SimLinkConfig link{.delay_us = 20, .rate_bytes_per_s = 4'000'000'000};
    flow::FlowConfig config{.window_bytes = 2 << 20};
    SimPeer sender(config);
    if (is_limited) config.receive_budget = &budget;
    SimPeer receiver(config);
    SimPeer::introduce(sender, receiver);
    SimNetwork network(1);
    sender.will_send(bulk(4, 8 << 20));
    receiver.will_receive(bulk(4, 8 << 20));
    network.connect(
        sender.flow(), receiver.flow(), std::array{network.add_link(link)}, std::array{network.add_link(link)},
        [&](uint64_t now_us) { sender.progress(now_us); }, [&](uint64_t now_us) { receiver.progress(now_us); });
    REQUIRE(network.run(SECOND_US, [&] { return sender.done() && receiver.done(); }));
    took_us[is_limited] = network.now_us();
  }
  CHECK(took_us[true] < took_us[false] * 103 / 100);
}

TEST_CASE("A long way is no queue: the budget grows to what fills it") {
  constexpr uint64_t DELAY_US = 500, RATE_BYTES_PER_S = 1'250'000'000;
  flow::ReceiveBudget budget({.min_bytes = 65'536, .target_queue_us = 250});
  flow::FlowConfig config{.window_bytes = 2 << 20};
  SimPeer sender(config);
  config.receive_budget = &budget;
  SimPeer receiver(config);
  SimPeer::introduce(sender, receiver);
  // Each message begins with a burst of the whole budget, whose end waits for longer than the target.
  receiver.max_open_receives = 1;
  const std::vector<TestMessage> messages = bulk(60, 1 << 20);
  sender.will_send(messages);
  receiver.will_receive(messages);
  SimNetwork network(1);
  const uint32_t there = network.add_link({.delay_us = DELAY_US, .rate_bytes_per_s = RATE_BYTES_PER_S});
  network.connect(
      sender.flow(), receiver.flow(), std::array{there}, std::array{network.add_link({.delay_us = DELAY_US})},
      [&](uint64_t now_us) { sender.progress(now_us); }, [&](uint64_t now_us) { receiver.progress(now_us); });
  REQUIRE(network.run(SECOND_US, [&] { return sender.done() && receiver.done(); }));
  CHECK(budget.bytes() >= 2 * DELAY_US * RATE_BYTES_PER_S / SECOND_US);
}

TEST_CASE("Grants never exceed the budget but for two packets a sender, and are given back") {
  flow::ReceiveBudget budget({.max_bytes = 40 * PACKET_BYTES,
                              .start_bytes = 40 * PACKET_BYTES,
                              .min_bytes = PACKET_BYTES,
                              .target_queue_us = 100});
  {
    std::vector<std::unique_ptr<flow::Grants>> flows;
    for (int i = 0; i < 4; ++i) {
      flows.push_back(std::make_unique<flow::Grants>(&budget, PACKET_BYTES));
      flows.back()->on_advertised(1'000);
    }
    CHECK(budget.expecting_flows() == 4);
    for (auto& grants : flows) CHECK(grants->issue(0, 0, 0) == 10);
    CHECK(budget.granted_bytes() == 40 * PACKET_BYTES);
    CHECK_FALSE(flows[0]->is_due());
    for (int i = 0; i < 5; ++i) flows[0]->on_arrival(0, false);
    CHECK(flows[0]->is_due());
    CHECK(flows[0]->issue(0, 5, 0) == 15);
    CHECK(budget.granted_bytes() == 40 * PACKET_BYTES);
    // A fifth flow finds nothing left, but still makes progress.
    flow::Grants late(&budget, PACKET_BYTES);
    late.on_advertised(100);
    CHECK(late.issue(0, 0, 0) == 2);
    // More than was granted arrives. That is counted, not rewarded.
    for (int i = 0; i < 3; ++i) late.on_arrival(0, false);
    CHECK(budget.granted_bytes() == 40 * PACKET_BYTES);
  }
  CHECK(budget.granted_bytes() == 0);
  CHECK(budget.expecting_flows() == 0);
  CHECK_THROWS_AS(flow::ReceiveBudget({.max_bytes = 1, .start_bytes = 2, .min_bytes = 1, .target_queue_us = 1}),
                  std::invalid_argument);
}

TEST_CASE("The budget shrinks by marks and by reported queues, grows by good news only") {
  flow::ReceiveBudget budget;
  flow::ReceiveBudget::Account account;
  const auto round = [&](bool is_marked) {
    for (uint64_t bytes = 0, end = budget.bytes(); bytes < end; bytes += PACKET_BYTES)
      budget.on_arrival(account, 0, PACKET_BYTES, is_marked);
  };
  const uint64_t start = budget.bytes();
  for (int i = 0; i < 10; ++i) round(false);
  CHECK(budget.bytes() == start);  // nobody said anything
  for (const bool is_second : {false, true}) {
    budget.on_queue_report(1);
    round(false);
    CHECK((budget.bytes() > start) == is_second);  // the first one's reports are of the round before
  }
  for (int i = 0; i < 60; ++i) {
    budget.on_queue_report(1);
    round(false);
  }
  CHECK(budget.bytes() == flow::ReceiveBudgetConfig{}.max_bytes);
  budget.on_queue_report(5'000);
  round(false);
  CHECK(budget.bytes() == flow::ReceiveBudgetConfig{}.max_bytes / 2);
  for (int i = 0; i < 100; ++i) round(true);
  CHECK(budget.bytes() == flow::ReceiveBudgetConfig{}.min_bytes);
}

TEST_CASE("A round of few arrivals ends by the clock: a budget that was short grows back, one that was not stays") {
  for (const bool is_short : {false, true}) {
    flow::ReceiveBudget budget;
    flow::ReceiveBudget::Account account;
    const uint64_t start = budget.bytes();
    for (uint64_t now_us = 0; now_us < 30'000; now_us += 1'000) {
      budget.on_queue_report(1);
      budget.on_granted(account, now_us, 0, is_short ? PACKET_BYTES : 0);
      budget.on_arrival(account, now_us, PACKET_BYTES, false);
    }
    CHECK((budget.bytes() > start) == is_short);
  }
}

TEST_CASE("Grants that a sender does not use are parked, count again from its first packet, and are given back") {
  constexpr uint64_t BUDGET_BYTES = 40 * PACKET_BYTES, IDLE_US = 1'000, STEP_US = 100;
  flow::ReceiveBudget budget(
      {.max_bytes = BUDGET_BYTES, .start_bytes = BUDGET_BYTES, .min_bytes = PACKET_BYTES, .target_queue_us = 100});
  flow::Grants live(&budget, PACKET_BYTES);
  auto straggler = std::make_unique<flow::Grants>(&budget, PACKET_BYTES);
  straggler->on_advertised(1'000);
  CHECK(straggler->issue(0, 0, 0) == 40);
  live.on_advertised(1'000'000);
  // Nobody looked while this host did not run, so no flow is late.
  uint64_t now_us = 100 * IDLE_US, received = 0;
  uint64_t granted = live.issue(now_us, 0, 0);
  CHECK(granted == 2);
  CHECK(budget.parked_bytes() == 0);
  const auto receive_until = [&](uint64_t end_us) {
    for (; now_us < end_us; now_us += STEP_US) {
      REQUIRE(received < granted);
      live.on_arrival(now_us, false);
      // A sender that has used its whole grant does not wait for the acknowledgement's timer.
      if (++received == granted) CHECK(live.is_due());
      granted = live.issue(now_us, received, 0);
    }
  };
  receive_until(now_us + IDLE_US / 2);
  CHECK(granted == received + 2);
  receive_until(now_us + 2 * IDLE_US);
  CHECK(budget.parked_bytes() == BUDGET_BYTES);
  CHECK(granted == received + 40);
  CHECK(budget.granted_bytes() == BUDGET_BYTES);
  flow::Grants late(&budget, PACKET_BYTES);
  late.on_advertised(1'000);
  CHECK(late.issue(now_us, 0, 0) == 2);

  SUBCASE("it wakes: what it has left counts again, and it gets no more before the others used theirs") {
    straggler->on_arrival(now_us, false);
    CHECK(budget.parked_bytes() == 0);
    CHECK(budget.granted_bytes() == (39 + 40 + 2) * PACKET_BYTES);
    CHECK(straggler->issue(now_us, 1, 0) == 40);
    for (int i = 0; i < 39; ++i) straggler->on_arrival(now_us, false);
    CHECK(straggler->is_due());
    CHECK(straggler->issue(now_us, 40, 0) == 42);
  }
  SUBCASE("it may wake at any moment: a sender that was never heard gets no second budget before its first packet") {
    live.clear();
    flow::Grants unheard(&budget, PACKET_BYTES);
    unheard.on_advertised(1'000);
    CHECK(unheard.issue(now_us, 0, 0) == 2);
    unheard.on_arrival(now_us, false);
    CHECK(unheard.is_due());
    CHECK(unheard.issue(now_us, 1, 0) == 1 + 40 / 2);
  }
  SUBCASE("it ends") {
    straggler->clear();
    CHECK(budget.parked_bytes() == 0);
    CHECK(budget.granted_bytes() == (40 + 2) * PACKET_BYTES);
    CHECK(budget.expecting_flows() == 2);
  }
  SUBCASE("a grant is not idle before the packets that others were granted earlier have arrived") {
    straggler->clear();
    for (int i = 0; i < 40; ++i) {
      now_us += IDLE_US;
      live.on_arrival(now_us, false);
      CHECK(budget.parked_bytes() == 0);
    }
    live.issue(now_us, received + 40, 0);
    live.on_arrival(now_us + IDLE_US, false);
    CHECK(budget.parked_bytes() == 2 * PACKET_BYTES);
  }
  SUBCASE("another one goes idle: no more than the largest budget is parked") {
    for (const uint64_t end_us = now_us + 3 * IDLE_US; now_us < end_us; now_us += STEP_US) {
      late.on_arrival(now_us, false);
      late.on_advertised(1'000'000);
      late.issue(now_us, 1, 0);
      CHECK(budget.parked_bytes() == BUDGET_BYTES);
      CHECK(budget.granted_bytes() >= 40 * PACKET_BYTES);
    }
  }
  late.clear();
  straggler.reset();
  CHECK(budget.parked_bytes() == 0);
  live.clear();
  CHECK(budget.granted_bytes() == 0);
  CHECK(budget.expecting_flows() == 0);
}

TEST_CASE("Senders that are granted and send nothing leave the port to the one that sends") {
  constexpr uint64_t SIZE_BYTES = 32 << 20;
  const auto took_us = [&](size_t stragglers) {
    flow::ReceiveBudget budget;
    std::vector<uint64_t> sizes_bytes(stragglers, 1 << 20);
    sizes_bytes.push_back(SIZE_BYTES);
    Incast incast(1, "fixed", 0, sizes_bytes, &budget);
    for (size_t i = 0; i < stragglers; ++i) incast.senders[i]->is_computing = true;
    REQUIRE(incast.run([&] { return incast.finished_us[stragglers] != 0; }));
    return incast.finished_us[stragglers];
  };
  const uint64_t alone_us = took_us(0);
  CHECK(alone_us < SIZE_BYTES * SECOND_US / Incast::RATE_BYTES_PER_S * 105 / 100);
  CHECK(took_us(7) * 9 <= alone_us * 10);
}

namespace {

// Seven of `size_bytes`, beside one of 32 MiB.
void check_late_starters(uint64_t size_bytes, std::string_view congestion) {
  constexpr uint64_t LIVE_BYTES = 32 << 20, WAIT_US = 10'000;
  CAPTURE(size_bytes);
  CAPTURE(congestion);
  flow::ReceiveBudget budget;
  std::vector<uint64_t> sizes_bytes(SENDERS, size_bytes);
  sizes_bytes.push_back(LIVE_BYTES);
  Incast incast(1, congestion, 0, sizes_bytes, &budget);
  for (size_t i = 0; i < SENDERS; ++i) incast.senders[i]->is_computing = true;
  REQUIRE(incast.run([&] { return incast.network.now_us() >= WAIT_US; }));
  CHECK(budget.parked_bytes() != 0);
  for (size_t i = 0; i < SENDERS; ++i) incast.senders[i]->is_computing = false;
  REQUIRE(incast.run());
  CHECK(incast.last_drop_us < WAIT_US + FIRST_ROUND_TRIP_US);
  const uint64_t ideal_us = (LIVE_BYTES + SENDERS * size_bytes) * SECOND_US / Incast::RATE_BYTES_PER_S;
  // Swift needs time to grow back.
  const uint64_t percent = congestion == "swift" ? 125 : 115;
  CHECK(*std::ranges::max_element(incast.finished_us) < ideal_us * percent / 100);
  CHECK(budget.granted_bytes() == 0);
  CHECK(budget.parked_bytes() == 0);
  CHECK(budget.expecting_flows() == 0);
}

}  // namespace

TEST_CASE(
    "Seven that were granted long ago and start at once, beside one that sends: drops in the first round trip only") {
  check_late_starters(256 << 10, "swift");
}

TEST_CASE("Seven that start late, with more to send" * doctest::test_suite("long")) {
  for (const std::string_view congestion : {"fixed", "swift"}) check_late_starters(1 << 20, congestion);
}
