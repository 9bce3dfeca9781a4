// SPDX-License-Identifier: Apache-2.0
// Whole simulated runs: real flows over the fabric.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "fabric/simulation.hpp"

using namespace sennit::fabric;

namespace {

using Kind = WorkloadConfig::Kind;

SimulationConfig small(Kind kind, uint64_t size_bytes) {
  SimulationConfig config;
  config.topology = {.hosts = 32, .hosts_per_leaf = 8, .spines = 8};
  config.transport.ticks_per_us = 10;
  config.workload = {.kind = kind, .size_bytes = size_bytes, .message_max_bytes = 65'536};
  return config;
}

SimulationResult run(const SimulationConfig& config) {
  Simulation simulation(config);
  while (simulation.advance(10'000)) {
  }
  SimulationResult result = simulation.result();
  INFO(result.failure);
  REQUIRE(result.failure.empty());
  // Every lost packet is counted.
  CHECK(result.sent_packets == result.delivered_packets + result.queue_dropped_packets + result.black_holed_packets +
                                   result.in_flight_packets);
  return result;
}

double ratio(const SimulationResult& result) { return result.completion_us / result.ideal_us; }

}  // namespace

TEST_CASE("Every workload moves exactly its bytes") {
  struct Row {
    Kind kind;
    uint64_t size_bytes, expected_bytes;
  };
  for (const Row& row :
       {Row{Kind::alltoall, 10'000, 32 * 31 * 10'000}, Row{Kind::allreduce_direct, 320'000, 2 * 31 * 320'000},
        Row{Kind::allreduce_ring, 320'000, 2 * 31 * 320'000}, Row{Kind::permutation, 100'000, 32 * 100'000},
        Row{Kind::incast, 50'000, 31 * 50'000}})
    for (const Spread spread : {Spread::sprayed, Spread::per_message}) {
      CAPTURE(static_cast<int>(row.kind));
      SimulationConfig config = small(row.kind, row.size_bytes);
      config.workload.message_max_bytes = 4'000;
      config.transport.spread = spread;
      const SimulationResult result = run(config);
      CHECK(result.is_complete);
      CHECK(result.message_bytes == row.expected_bytes);
      CHECK(result.messages == result.message_us.size());
      CHECK(std::accumulate(result.arrived_bytes.begin(), result.arrived_bytes.end(), uint64_t{0}) ==
            row.expected_bytes);
      CHECK(result.completion_us > result.ideal_us);
    }
}

TEST_CASE("An uncontended path carries a message at the link's rate") {
  SimulationConfig config = small(Kind::incast, 16'000'000);
  config.topology = {.hosts = 2, .hosts_per_leaf = 1, .spines = 4};
  config.workload.message_max_bytes = 16'000'000;
  config.transport.flow.window_bytes = 1'048'576;
  const SimulationResult result = run(config);
  REQUIRE(result.is_complete);
  CHECK(result.ideal_us == doctest::Approx(1'280 + 4));
  // Headers are 3 % of a full packet; the rest is the rendezvous and the acknowledgements.
  CHECK(ratio(result) > 1.029);
  CHECK(ratio(result) < 1.06);
  CHECK(result.queue_dropped_packets == 0);
  CHECK(result.flow.retransmitted_packets == 0);
}

TEST_CASE("Flows that share a link share it evenly") {
  // Each host of leaf 0 sends to its opposite host of leaf 1, all over one spine.
  SimulationConfig config = small(Kind::permutation, 4'000'000);
  config.topology = {.hosts = 8, .hosts_per_leaf = 4, .spines = 1};
  config.workload.message_max_bytes = 4'000'000;
  const SimulationResult result = run(config);
  REQUIRE(result.is_complete);
  CHECK(result.ideal_us == doctest::Approx(4 * 320 + 4));
  // Each flow carries one message, so all finish at about the same time.
  const auto [fastest, slowest] = std::ranges::minmax(result.message_us);
  CHECK(fastest > 0.7 * slowest);
  CHECK(ratio(result) < 1.15);
}

TEST_CASE("Incast fills the port's queue, and dropped packets are sent again") {
  SimulationConfig config = small(Kind::incast, 400'000);
  config.link.queue_limit_bytes = 300'000;
  const SimulationResult result = run(config);
  REQUIRE(result.is_complete);
  CHECK(result.queue_dropped_packets > 0);
  CHECK(result.flow.retransmitted_packets >= result.queue_dropped_packets / 2);
  for (const LinkUse& link : result.links) CHECK(link.peak_queue_bytes <= 300'000);
}

TEST_CASE("Spraying fills the fabric where hashing whole messages does not") {
  SimulationConfig config = small(Kind::permutation, 2'000'000);
  config.workload.message_max_bytes = 2'000'000;
  config.transport.flow.window_bytes = 524'288;
  const SimulationResult sprayed = run(config);
  config.transport.flow.path_count = 1;
  const SimulationResult single = run(config);
  REQUIRE(sprayed.is_complete);
  REQUIRE(single.is_complete);
  CHECK(ratio(sprayed) < 1.5);
  // At least two flows share an uplink. With eight hosts on eight spines only luck avoids that.
  CHECK(ratio(single) > 1.9);
}

TEST_CASE("Links that fail before the start cost their share of the rate, links that fail later lose no message") {
  SimulationConfig config = small(Kind::alltoall, 65'536);
  config.failure = {.fraction = 0.06};  // 2 of 32
  const SimulationResult before = run(config);
  REQUIRE(before.is_complete);
  CHECK(before.black_holed_packets == 0);
  CHECK(ratio(before) < 1.5);
  for (const LinkUse& link : before.links)
    if (link.has_failed) CHECK(link.fraction == 0);

  config.failure = {.fraction = 0.06, .at_us = 50, .convergence_us = 5'000};
  const SimulationResult during = run(config);
  CHECK(during.is_complete);
  CHECK(during.black_holed_packets > 0);
  CHECK(during.message_bytes == before.message_bytes);

  // With one path, a flow that hashed onto the dead link waits for the new routes.
  config.transport.flow.path_count = 1;
  const SimulationResult single = run(config);
  CHECK(single.is_complete);
  CHECK(single.completion_us > 5'050);
}

TEST_CASE("Spraying costs neither acknowledgements nor tail probes") {
  // Every host sends each block in one window, all at once. So a block's last packet comes long after its first.
  SimulationConfig config = small(Kind::alltoall, 65'536);
  config.transport.ticks_per_us = 5;
  config.transport.flow.window_bytes = 65'536;
  config.transport.flow.ack_delay_us = 200;
  config.workload.peers_at_a_time = 31;
  const SimulationResult result = run(config);
  REQUIRE(result.is_complete);
  // For 16 packets: an advert, and acknowledgements of the first packet, of half the window and of the end.
  CHECK(result.flow.control_packets_sent < 0.27 * static_cast<double>(result.flow.data_packets_sent));
  CHECK(result.flow.retransmitted_packets == 0);
  CHECK(ratio(result) < 1.15);
}

TEST_CASE("In a ring with a window of several blocks, many paths are as fast as one") {
  SimulationConfig config = small(Kind::allreduce_ring, 32 * 16'384);
  config.transport.flow.window_bytes = 131'072;
  const SimulationResult sprayed = run(config);
  config.transport.flow.path_count = 1;
  const SimulationResult single = run(config);
  REQUIRE(sprayed.is_complete);
  REQUIRE(single.is_complete);
  CHECK(sprayed.completion_us < 1.02 * single.completion_us);
}

TEST_CASE("The ideal is the time of the narrowest cut") {
  // Half as many uplinks as hosts: the leaf's links are the bottleneck.
  SimulationConfig config = small(Kind::permutation, 1'000'000);
  config.topology.spines = 4;
  CHECK(run(config).ideal_us == doctest::Approx(2 * 80 + 4));
  // A leaf that loses one of eight uplinks in the middle carries 8 before and 7 after.
  config.topology.spines = 8;
  config.failure = {.fraction = 0.01, .at_us = 40, .convergence_us = 0};
  CHECK(run(config).ideal_us == doctest::Approx(40 + 40 * 8.0 / 7 + 4));
}

TEST_CASE("Three tiers: spraying finds all cores") {
  SimulationConfig config = small(Kind::alltoall, 131'072);
  config.topology = {.hosts = 64, .hosts_per_leaf = 4, .spines = 4, .leaves_per_pod = 4, .cores_per_spine = 4};
  const SimulationResult result = run(config);
  REQUIRE(result.is_complete);
  CHECK(ratio(result) < 1.4);
  double least = 1, most = 0;
  for (const LinkUse& link : result.links)
    if (link.tier == LinkUse::Tier::spine_up) {
      least = std::min(least, link.fraction);
      most = std::max(most, link.fraction);
    }
  CHECK(least > 0.5 * most);
}

TEST_CASE("A run is a pure function of its configuration") {
  SimulationConfig config = small(Kind::alltoall, 20'000);
  config.failure = {.fraction = 0.05, .at_us = 20, .convergence_us = 200};
  const SimulationResult first = run(config), second = run(config);
  CHECK(first.trace_hash == second.trace_hash);
  CHECK(first.completion_us == second.completion_us);
  config.seed = 2;
  CHECK(run(config).trace_hash != first.trace_hash);
}

TEST_CASE("A run past its deadline ends incomplete; impossible configurations are refused") {
  SimulationConfig config = small(Kind::alltoall, 65'536);
  config.deadline_us = 50;
  CHECK_FALSE(run(config).is_complete);
  config.failure.fraction = 1;
  CHECK_THROWS_WITH(Simulation{config},
                    "the 32 failed cables leave leaves without a path; use fewer cables or another seed");
  config = small(Kind::allreduce_ring, 1'000);
  CHECK_THROWS_WITH(Simulation{config}, "size_bytes is 1000; allowed for an allreduce: a multiple of hosts (32)");
  config = small(Kind::alltoall, 1'000);
  config.transport.ticks_per_us = 0;
  CHECK_THROWS_WITH(Simulation{config}, "ticks_per_us is 0; allowed: 1..1000");
  config.transport = {};
  config.transport.batch_packets = 65;
  CHECK_THROWS_WITH(Simulation{config}, "batch_packets is 65; allowed: 1..64");
}
