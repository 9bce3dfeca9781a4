// SPDX-License-Identifier: Apache-2.0
// Queues that fill: marks, windows, grants, and incast to one receiver.
#include <doctest/doctest.h>

#include <algorithm>

#include "flow/congestion.hpp"
#include "flow/grants.hpp"
#include "flow/receive_budget.hpp"
#include "sim_peer.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

constexpr uint32_t PACKET_BYTES = 4'096;

// Several senders to one receiver, whose last hop is a rate-limited port with a short queue.
struct Incast {
  static constexpr size_t SENDERS = 7;
  static constexpr uint64_t RATE_BYTES_PER_S = 1'000'000'000;

  Incast(uint64_t seed, std::string_view congestion, uint64_t ecn_threshold_bytes, uint64_t size_bytes,
         flow::ReceiveBudget* budget)
      : network(seed), finished_us(SENDERS, 0) {
    const uint32_t shared = network.add_link({.delay_us = 20,
                                              .rate_bytes_per_s = RATE_BYTES_PER_S,
                                              .queue_limit_bytes = 300'000,
                                              .ecn_threshold_bytes = ecn_threshold_bytes});
    const uint32_t back = network.add_link({.delay_us = 20});
    for (size_t i = 0; i < SENDERS; ++i) {
      flow::FlowConfig config{.window_bytes = 2 << 20, .congestion = congestion};
      SimPeer& sender = *senders.emplace_back(std::make_unique<SimPeer>(config));
      config.receive_budget = budget;
      SimPeer& receiver = *receivers.emplace_back(std::make_unique<SimPeer>(config));
      SimPeer::introduce(sender, receiver);
      sender.will_send(bulk(1, size_bytes));
      receiver.will_receive(bulk(1, size_bytes));
      network.connect(
          sender.flow(), receiver.flow(), std::array{shared}, std::array{back},
          [&sender](uint64_t now_us) { sender.progress(now_us); },
          [this, &receiver, i](uint64_t now_us) {
            receiver.progress(now_us);
            if (receiver.done() && finished_us[i] == 0) finished_us[i] = now_us;
          });
    }
  }
  bool run() {
    const auto is_done = [](const auto& peer) { return peer->done(); };
    const bool arrived = network.run(10 * SECOND_US, [&] {
      if (network.counters().queue_drops != drops) {
        drops = network.counters().queue_drops;
        last_drop_us = network.now_us();
      }
      return std::ranges::all_of(senders, is_done) && std::ranges::all_of(receivers, is_done);
    });
    std::ranges::sort(finished_us);
    return arrived;
  }

  SimNetwork network;
  std::vector<std::unique_ptr<SimPeer>> senders, receivers;
  std::vector<uint64_t> finished_us;  // by sender; sorted after run
  uint64_t drops = 0, last_drop_us = 0;
};

}  // namespace

TEST_CASE("Incast of 7 to 1: no drop after the first round trip, and all finish together") {
  // 40 us of way and a queue of 300 us.
  constexpr uint64_t FIRST_ROUND_TRIP_US = 340;
  for (const std::string_view congestion : {"fixed", "swift"})
    for (const uint64_t ecn_threshold_bytes : {0u, 60'000u})
      for (const uint64_t size_bytes : {1u << 20, 4u << 20})
        for (uint64_t seed = 1; seed <= 2; ++seed) {
          CAPTURE(congestion);
          CAPTURE(ecn_threshold_bytes);
          CAPTURE(size_bytes);
          CAPTURE(seed);
          flow::ReceiveBudget budget;
          Incast incast(seed, congestion, ecn_threshold_bytes, size_bytes, &budget);
          REQUIRE(incast.run());
          CHECK(incast.last_drop_us < FIRST_ROUND_TRIP_US);
          CHECK(incast.finished_us.back() * 2 <= incast.finished_us[Incast::SENDERS / 2] * 3);
          // The port is never idle for long, either.
          const uint64_t ideal_us = Incast::SENDERS * size_bytes * SECOND_US / Incast::RATE_BYTES_PER_S;
          CHECK(incast.finished_us.back() < ideal_us * 115 / 100);
          CHECK(budget.granted_bytes() == 0);
          CHECK(budget.expecting_flows() == 0);
          uint64_t marked = 0;
          for (const auto& receiver : incast.receivers)
            marked += receiver->flow().counters().np_ecn_marked_roce_packets;
          CHECK((marked != 0) == (ecn_threshold_bytes != 0));
        }
}

TEST_CASE("Without a budget the same incast drops and goes on dropping") {
  Incast incast(1, "fixed", 0, 1 << 20, nullptr);
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

TEST_CASE("A marked path is skipped for a round trip; the window gives way and the bytes arrive") {
  const SimLinkConfig good{.delay_us = 30, .rate_bytes_per_s = 1'000'000'000};
  SimLinkConfig narrow{
      .delay_us = 30, .rate_bytes_per_s = 100'000'000, .queue_limit_bytes = 1'000'000, .ecn_threshold_bytes = 50'000};
  const auto run = [&](std::string_view policy) {
    SimPair pair(3, {.window_bytes = 2 << 20, .path_policy = policy, .congestion = "swift"}, {good, good, narrow, good},
                 {good});
    pair.network.set_scribbling(false);
    pair.exchange(bulk(8, 4 << 20), {});
    REQUIRE(pair.run(SECOND_US));
    CHECK(pair.network.counters().marked > 0);
    CHECK(pair.network.counters().queue_drops == 0);
    // Of data; the sender's own controls are marked, too.
    const uint64_t marked_controls =
        pair.network.counters().marked - pair.b.flow().counters().np_ecn_marked_roce_packets;
    CHECK(marked_controls <= pair.a.flow().counters().control_packets_sent);
    CHECK(pair.a.flow().counters().path_state_changes > 0);
    CHECK(pair.a.flow().counters().retransmitted_packets == 0);
    return pair.network.now_us();
  };
  // The three good paths carry 3 GB/s; all four in turn, at the narrow one's pace, 0.4.
  const uint64_t ideal_us = (uint64_t{32} << 20) / 3'100;
  CHECK(run("round_robin") < 3 * ideal_us);
  CHECK(run("reps") < 3 * ideal_us);
}

TEST_CASE("Swift: single losses leave the window alone; delay, marks and bursts do not") {
  const auto feed = [](flow::CongestionControl& control, uint32_t marked, uint64_t fabric_us, uint32_t lost) {
    uint64_t now_us = 0;
    for (int round = 0; round < 200; ++round) {
      control.on_losses(now_us, 0, lost);
      control.on_feedback({now_us, 0, 32, marked, fabric_us, 100}, 1, control.window_packets());
      now_us += 100;
    }
    return control.window_packets();
  };
  const flow::CongestionLimits limits{512, 1, 100};
  const auto fresh = [&] { return flow::make_congestion_control("swift", limits); };
  CHECK(feed(*fresh(), 0, 100, 0) == 512);
  CHECK(feed(*fresh(), 0, 100, 2) == 512);
  CHECK(feed(*fresh(), 0, 100, 12) < 64);
  CHECK(feed(*fresh(), 0, 400, 0) < 64);
  CHECK(feed(*fresh(), 32, 100, 0) < 64);
  CHECK(feed(*fresh(), 0, 120, 0) == 512);
  const auto control = fresh();
  CHECK_FALSE(control->paces());
  feed(*control, 0, 400, 0);
  CHECK(control->paces());
  CHECK(feed(*control, 0, 100, 0) > 64);  // and back
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
    for (auto& grants : flows) CHECK(grants->issue(0) == 10);
    CHECK(budget.granted_bytes() == 40 * PACKET_BYTES);
    CHECK_FALSE(flows[0]->is_due());
    for (int i = 0; i < 5; ++i) flows[0]->on_arrival(false);
    CHECK(flows[0]->is_due());
    CHECK(flows[0]->issue(5) == 15);
    CHECK(budget.granted_bytes() == 40 * PACKET_BYTES);
    // A fifth finds nothing left, but goes on all the same.
    flow::Grants late(&budget, PACKET_BYTES);
    late.on_advertised(100);
    CHECK(late.issue(0) == 2);
    // More than was granted arrives: counted, not rewarded.
    for (int i = 0; i < 3; ++i) late.on_arrival(false);
    CHECK(budget.granted_bytes() == 40 * PACKET_BYTES);
  }
  CHECK(budget.granted_bytes() == 0);
  CHECK(budget.expecting_flows() == 0);
  CHECK_THROWS_AS(flow::ReceiveBudget({.max_bytes = 1, .start_bytes = 2, .min_bytes = 1, .target_queue_us = 1}),
                  std::invalid_argument);
}

TEST_CASE("The budget shrinks by marks and by reported queues, grows by good news only") {
  flow::ReceiveBudget budget;
  const auto round = [&](bool is_marked) {
    for (uint64_t bytes = 0, end = budget.bytes(); bytes < end; bytes += PACKET_BYTES)
      budget.on_arrival(PACKET_BYTES, is_marked);
  };
  const uint64_t start = budget.bytes();
  for (int i = 0; i < 10; ++i) round(false);
  CHECK(budget.bytes() == start);  // nobody said anything
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
