// SPDX-License-Identifier: Apache-2.0
// Whole simulated runs: real flows over the fabric.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "fabric/simulation.hpp"
#include "tests/engine_group.hpp"

using namespace sennit::fabric;

namespace {

using sennit::Operand;
using sennit::StepKind;
using sennit::test::PlanWriter;
using Plans = std::vector<std::vector<std::byte>>;

struct Run {
  SimulationConfig config;
  Plans plans;
  std::vector<uint64_t> counts = {};
};

SimulationConfig small() {
  SimulationConfig config;
  config.topology = {.hosts = 32, .hosts_per_leaf = 8, .spines = 8};
  config.transport.ticks_per_us = 10;
  return config;
}

// Each pair sends one block, in messages of at most this many bytes.
Plans blocks(uint32_t hosts, const std::vector<std::pair<uint32_t, uint32_t>>& pairs, uint64_t size_bytes,
             uint64_t message_max_bytes = 65'536) {
  std::vector<PlanWriter> writers;
  for (uint32_t rank = 0; rank < hosts; ++rank) writers.emplace_back(hosts, rank, uint16_t{1}, 7);
  for (uint64_t at = 0, slot = 0; at < size_bytes; at += message_max_bytes, ++slot) {
    const uint64_t part_bytes = std::min(message_max_bytes, size_bytes - at);
    const auto number = static_cast<uint32_t>(slot);
    for (const auto& [from, to] : pairs) {
      writers[from].add(StepKind::send, to, number, 0, 0, part_bytes, {Operand{.offset = at}});
      writers[to].add(StepKind::receive, from, number, 0, at, part_bytes);
    }
  }
  Plans plans;
  for (const PlanWriter& writer : writers) plans.push_back(writer.bytes());
  return plans;
}

Plans permutation(uint32_t hosts, uint64_t size_bytes, uint64_t message_max_bytes = 65'536) {
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  for (uint32_t host = 0; host < hosts; ++host) pairs.emplace_back(host, (host + hosts / 2) % hosts);
  return blocks(hosts, pairs, size_bytes, message_max_bytes);
}

Plans incast(uint32_t hosts, uint64_t size_bytes, uint64_t message_max_bytes = 65'536) {
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  for (uint32_t host = 1; host < hosts; ++host) pairs.emplace_back(host, 0);
  return blocks(hosts, pairs, size_bytes, message_max_bytes);
}

Run alltoall(const SimulationConfig& config, uint64_t size_bytes) {
  Run run{config, {}, std::vector<uint64_t>(2 * config.topology.hosts, size_bytes)};
  for (uint32_t rank = 0; rank < config.topology.hosts; ++rank)
    run.plans.push_back(PlanWriter::alltoall(config.topology.hosts, rank, 1));
  return run;
}

Plans allreduce(uint32_t hosts, uint64_t size_bytes) {
  Plans plans;
  for (uint32_t rank = 0; rank < hosts; ++rank) plans.push_back(PlanWriter::allreduce(hosts, rank, size_bytes));
  return plans;
}

void add(Simulation& simulation, const Run& run) {
  for (const std::vector<std::byte>& plan : run.plans) simulation.add_rank(plan, run.counts);
}

SimulationResult simulate(const Run& run) {
  Simulation simulation(run.config);
  add(simulation, run);
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

TEST_CASE("Every plan moves exactly its bytes") {
  struct Row {
    Run run;
    uint64_t messages, bytes;
  };
  for (const Row& row : {Row{alltoall(small(), 10'000), 32 * 31, 32 * 31 * 10'000},
                         // In one packet each, and in two parts: small messages, then loans.
                         Row{{small(), allreduce(32, 2'000)}, 32 * 31, 32 * 31 * 2'000},
                         Row{{small(), allreduce(32, 200'000)}, 2 * 32 * 31, 32 * 31 * 200'000},
                         Row{{small(), permutation(32, 100'000, 4'000)}, 32 * 25, 32 * 100'000},
                         Row{{small(), incast(32, 50'000, 4'000)}, 31 * 13, 31 * 50'000}})
    for (const double failed : {0.0, 0.03}) {
      Run run = row.run;
      run.config.failure = {.fraction = failed, .at_us = 10, .convergence_us = 1'000};
      Simulation simulation(run.config);
      add(simulation, run);
      while (simulation.advance(10'000)) {
      }
      const SimulationResult result = simulation.result();
      CHECK(result.is_complete);
      CHECK(result.messages == row.messages);
      CHECK(result.message_bytes == row.bytes);
      CHECK(result.completion_us > result.ideal_us);
      uint64_t least = UINT64_MAX, most = 0;
      for (const Traffic& pair : simulation.traffic()) {
        least = std::min(least, pair.bytes);
        most = std::max(most, pair.bytes);
      }
      CHECK(least == most);
    }
}

TEST_CASE("An uncontended path carries a message at the link's rate") {
  SimulationConfig config = small();
  config.topology = {.hosts = 2, .hosts_per_leaf = 1, .spines = 4};
  config.transport.flow.window_bytes = 1'048'576;
  const SimulationResult result = simulate({config, incast(2, 16'000'000, 16'000'000)});
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
  SimulationConfig config = small();
  config.topology = {.hosts = 8, .hosts_per_leaf = 4, .spines = 1};
  const SimulationResult result = simulate({config, permutation(8, 4'000'000, 4'000'000)});
  REQUIRE(result.is_complete);
  CHECK(result.ideal_us == doctest::Approx(4 * 320 + 4));
  // Each flow carries one message, so all finish at about the same time.
  const auto [fastest, slowest] = std::ranges::minmax(result.message_us);
  CHECK(fastest > 0.7 * slowest);
  CHECK(ratio(result) < 1.15);
}

TEST_CASE("Incast fills the port's queue, and dropped packets are sent again") {
  SimulationConfig config = small();
  config.link.queue_limit_bytes = 300'000;
  const Plans plans = incast(32, 400'000);
  const SimulationResult result = simulate({config, plans});
  REQUIRE(result.is_complete);
  CHECK(result.queue_dropped_packets > 0);
  CHECK(result.flow.retransmitted_packets >= result.queue_dropped_packets / 2);
  for (const LinkUse& link : result.links) CHECK(link.peak_queue_bytes <= 300'000);
  // With a budget the receiver lets in no more than its queue can take.
  config.transport.receive_budget_bytes = 131'072;
  CHECK(simulate({config, plans}).queue_dropped_packets == 0);
}

TEST_CASE("Spraying fills the fabric where hashing whole messages does not") {
  SimulationConfig config = small();
  config.transport.flow.window_bytes = 524'288;
  const Plans plans = permutation(32, 2'000'000, 2'000'000);
  const SimulationResult sprayed = simulate({config, plans});
  config.transport.flow.path_count = 1;
  const SimulationResult single = simulate({config, plans});
  REQUIRE(sprayed.is_complete);
  REQUIRE(single.is_complete);
  CHECK(ratio(sprayed) < 1.5);
  // At least two flows share an uplink. With eight hosts on eight spines only luck avoids that.
  CHECK(ratio(single) > 1.9);
}

TEST_CASE("Links that fail before the start cost their share of the rate, links that fail later lose no message") {
  Run run = alltoall(small(), 65'536);
  run.config.failure = {.fraction = 0.06};  // 2 of 32
  const SimulationResult before = simulate(run);
  REQUIRE(before.is_complete);
  CHECK(before.black_holed_packets == 0);
  CHECK(ratio(before) < 1.5);
  for (const LinkUse& link : before.links)
    if (link.has_failed) CHECK(link.fraction == 0);

  run.config.failure = {.fraction = 0.06, .at_us = 50, .convergence_us = 5'000};
  const SimulationResult during = simulate(run);
  CHECK(during.is_complete);
  CHECK(during.black_holed_packets > 0);
  CHECK(during.message_bytes == before.message_bytes);

  // With one path, a flow that hashed onto the dead link waits for the new routes.
  run.config.transport.flow.path_count = 1;
  const SimulationResult single = simulate(run);
  CHECK(single.is_complete);
  CHECK(single.completion_us > 5'050);
}

TEST_CASE("Spraying costs neither acknowledgements nor tail probes") {
  // Every host sends each block in one window, all at once. So a block's last packet comes long after its first.
  SimulationConfig config = small();
  config.transport.turn_packets = 1;
  config.transport.ticks_per_us = 5;
  config.transport.flow.window_bytes = 65'536;
  config.transport.flow.ack_delay_us = 200;
  const SimulationResult result = simulate(alltoall(config, 65'536));
  REQUIRE(result.is_complete);
  // For 16 packets: an advert, and acknowledgements of the first packet, of half the window and of the end.
  CHECK(result.flow.control_packets_sent < 0.27 * static_cast<double>(result.flow.data_packets_sent));
  CHECK(result.flow.retransmitted_packets == 0);
  CHECK(ratio(result) < 1.15);
}

TEST_CASE("Control packets with a class of their own wait for no data") {
  // The one spine is full in both directions. A message needs an advert, which comes through a full queue.
  SimulationConfig config = small();
  config.topology = {.hosts = 8, .hosts_per_leaf = 4, .spines = 1};
  const Plans plans = permutation(8, 1'000'000, 16'384);
  const SimulationResult behind = simulate({config, plans});
  config.transport.control_first = true;
  const SimulationResult first = simulate({config, plans});
  REQUIRE(behind.is_complete);
  REQUIRE(first.is_complete);
  CHECK(first.message_bytes == behind.message_bytes);
  const auto mean_us = [](const SimulationResult& result) {
    return std::accumulate(result.message_us.begin(), result.message_us.end(), 0.0) /
           static_cast<double>(result.message_us.size());
  };
  // Data waits as long as before. The acknowledgement does not.
  CHECK(mean_us(first) < 0.95 * mean_us(behind));
  CHECK(first.flow.duplicate_packets == 0);
}

TEST_CASE("The ideal is the time of the narrowest cut") {
  // Half as many uplinks as hosts: the leaf's links are the bottleneck.
  SimulationConfig config = small();
  const Plans plans = permutation(32, 1'000'000);
  config.topology.spines = 4;
  CHECK(simulate({config, plans}).ideal_us == doctest::Approx(2 * 80 + 4));
  // A leaf that loses one of eight uplinks in the middle carries 8 before and 7 after.
  config.topology.spines = 8;
  config.failure = {.fraction = 0.01, .at_us = 40, .convergence_us = 0};
  CHECK(simulate({config, plans}).ideal_us == doctest::Approx(40 + 40 * 8.0 / 7 + 4));
}

TEST_CASE("Three tiers: spraying finds all cores") {
  SimulationConfig config = small();
  config.topology = {.hosts = 64, .hosts_per_leaf = 4, .spines = 4, .leaves_per_pod = 4, .cores_per_spine = 4};
  const SimulationResult result = simulate(alltoall(config, 131'072));
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
  Run run = alltoall(small(), 20'000);
  run.config.failure = {.fraction = 0.05, .at_us = 20, .convergence_us = 200};
  const SimulationResult first = simulate(run), second = simulate(run);
  CHECK(first.trace_hash == second.trace_hash);
  CHECK(first.completion_us == second.completion_us);
  run.config.seed = 2;
  CHECK(simulate(run).trace_hash != first.trace_hash);
}

TEST_CASE("A run past its deadline ends incomplete; impossible configurations are refused") {
  SimulationConfig config = small();
  config.deadline_us = 50;
  CHECK_FALSE(simulate(alltoall(config, 65'536)).is_complete);
  config.failure.fraction = 1;
  CHECK_THROWS_WITH(Simulation{config},
                    "the 32 failed cables leave leaves without a path; use fewer cables or another seed");
  config = small();
  config.transport.ticks_per_us = 0;
  CHECK_THROWS_WITH(Simulation{config}, "ticks_per_us is 0; allowed: 1..1000");
  config.transport = {};
  config.transport.turn_packets = 0;
  CHECK_THROWS_WITH(Simulation{config}, "turn_packets is 0; allowed: 1..64");
  config.transport = {};
  config.transport.batch_packets = 65;
  CHECK_THROWS_WITH(Simulation{config}, "batch_packets is 65; allowed: 1..64");
}
