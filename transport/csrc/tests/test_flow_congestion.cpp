// SPDX-License-Identifier: Apache-2.0
// Full queues: marks, delay, and the windows that shrink.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>

#include "flow/congestion.hpp"
#include "flow/receive_budget.hpp"
#include "sim_peer.hpp"

using namespace sennit;
using namespace sennit::test;

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
    // Data only, because the sender's own controls are marked too.
    const uint64_t marked_controls =
        pair.network.counters().marked - pair.b.flow().counters().np_ecn_marked_roce_packets;
    CHECK(marked_controls <= pair.a.flow().counters().control_packets_sent);
    CHECK(pair.a.flow().counters().path_state_changes > 0);
    // Nothing was taken for lost. A small window may wait for the acknowledgement's timer, and ask.
    CHECK(pair.a.flow().counters().retransmitted_packets == pair.a.flow().counters().tail_probe_packets);
    return pair.network.now_us();
  };
  // The three good paths carry 3 GB/s. All four in turn, at the narrow path's pace, carry 0.4.
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

TEST_CASE("DCTCP: full windows and rare losses leave it alone, marks and an overflow do not") {
  const auto feed = [](flow::CongestionControl& control, uint32_t marked, uint32_t lost, uint32_t paths) {
    for (uint64_t now_us = 0; now_us < 20'000; now_us += 100) {
      control.on_losses(now_us, 0, lost);
      for (uint32_t path = 0; path < paths; ++path)
        control.on_feedback({now_us, path, 32 / paths, marked / paths, 400, 100}, paths, control.window_packets());
    }
    return control.window_packets();
  };
  for (const uint32_t paths : {1u, 8u}) {
    CAPTURE(paths);
    const auto fresh = [&] { return flow::make_congestion_control("dctcp", {512, paths, 100}); };
    CHECK(fresh()->window_packets() == 512);
    CHECK(feed(*fresh(), 0, 0, paths) == 512);  // the delay is the receiver's business
    CHECK(feed(*fresh(), 0, 2, paths) == 512);
    CHECK(feed(*fresh(), 0, 12, paths) < 64);
    CHECK(feed(*fresh(), 32, 0, paths) < 64);
    const auto control = fresh();
    CHECK_FALSE(control->paces());
    feed(*control, 32, 0, paths);
    CHECK(control->paces());
    CHECK(feed(*control, 0, 0, paths) > 256);  // and back
  }
}

TEST_CASE("Pairs that share a link but no end: only senders can hold it, and losses on many paths count together") {
  constexpr size_t PAIRS = 32;
  constexpr uint64_t SIZE_BYTES = 2 << 20, RATE_BYTES_PER_S = 1'250'000'000;
  const auto again = [&](std::string_view congestion) {
    SimNetwork network(1);
    const uint32_t shared =
        network.add_link({.delay_us = 20, .rate_bytes_per_s = RATE_BYTES_PER_S, .queue_limit_bytes = 512 << 10});
    const uint32_t back = network.add_link({.delay_us = 20});
    std::vector<std::unique_ptr<flow::ReceiveBudget>> budgets;
    std::vector<std::unique_ptr<SimPeer>> peers;
    for (size_t pair = 0; pair < PAIRS; ++pair) {
      flow::FlowConfig config{.congestion = congestion};
      SimPeer& sender = *peers.emplace_back(std::make_unique<SimPeer>(config));
      config.receive_budget = budgets
                                  .emplace_back(std::make_unique<flow::ReceiveBudget>(
                                      flow::ReceiveBudgetConfig{.min_bytes = 65'536, .target_queue_us = 250}))
                                  .get();
      SimPeer& receiver = *peers.emplace_back(std::make_unique<SimPeer>(config));
      SimPeer::introduce(sender, receiver);
      sender.will_send(bulk(1, SIZE_BYTES));
      receiver.will_receive(bulk(1, SIZE_BYTES));
      network.connect(
          sender.flow(), receiver.flow(), std::array{shared}, std::array{back},
          [&sender](uint64_t now_us) { sender.progress(now_us); },
          [&receiver](uint64_t now_us) { receiver.progress(now_us); });
    }
    REQUIRE(
        network.run(SECOND_US, [&] { return std::ranges::all_of(peers, [](auto& peer) { return peer->done(); }); }));
    CHECK(network.now_us() < PAIRS * SIZE_BYTES * SECOND_US / RATE_BYTES_PER_S * 115 / 100);
    uint64_t retransmitted = 0;
    for (const auto& peer : peers) retransmitted += peer->flow().counters().retransmitted_packets;
    return retransmitted;
  };
  const uint64_t fixed = again("fixed"), dctcp = again("dctcp"), swift = again("swift");
  MESSAGE("sent again: fixed ", fixed, ", dctcp ", dctcp, ", swift ", swift);
  CHECK(dctcp * 4 < fixed * 3);
  CHECK(swift * 4 < fixed * 3);
}
