// SPDX-License-Identifier: Apache-2.0
// Full queues: marks, delay, and the windows that shrink.
#include <doctest/doctest.h>

#include "flow/congestion.hpp"
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
    CHECK(pair.a.flow().counters().retransmitted_packets == 0);
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
