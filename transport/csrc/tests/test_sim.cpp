// SPDX-License-Identifier: Apache-2.0
// The simulator itself: a run is a pure function of its seed, and links behave as configured.
#include <doctest/doctest.h>

#include "sim_peer.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

const flow::FlowConfig SMALL{.path_count = 3, .payload_max_bytes = 256, .eager_slot_count = 16, .window_bytes = 16'384};

SimLinkConfig random_link(SimRandom& random) {
  SimLinkConfig link;
  link.delay_us = 1 + random.below(200);
  if (random.chance(0.5)) link.jitter_us = random.below(300);
  if (random.chance(0.5)) link.rate_bytes_per_s = 20'000'000 + random.below(1'000'000'000);
  if (link.rate_bytes_per_s != 0 && random.chance(0.5)) link.queue_limit_bytes = 6'000 + random.below(30'000);
  if (random.chance(0.7)) link.loss_fraction = static_cast<double>(random.below(300)) / 1'000;
  if (random.chance(0.3)) link.duplicate_fraction = static_cast<double>(random.below(200)) / 1'000;
  if (random.chance(0.3)) link.corrupt_fraction = static_cast<double>(random.below(200)) / 1'000;
  if (random.chance(0.2)) link.black_holes.push_back({random.below(1'000), 1'000 + random.below(30'000)});
  return link;
}

struct Outcome {
  bool is_complete;
  uint64_t trace_hash, now_us;
  std::string state;
};

Outcome random_run(uint64_t seed) {
  SimRandom random(seed);
  flow::FlowConfig config = SMALL;
  config.path_count = 1 + static_cast<uint32_t>(random.below(5));
  config.seed = seed;
  std::vector<SimLinkConfig> there, back;
  for (uint64_t i = 0, count = 1 + random.below(config.path_count); i < count; ++i) {
    there.push_back(random_link(random));
    back.push_back(random_link(random));
  }
  SimPair pair(random.next(), config, there, back);
  pair.a.defer_fraction = random.chance(0.2) ? 0.3 : 0;
  const auto from_a = random_messages(random, random.below(12), config.payload_max_bytes, 6'000);
  const auto from_b = random_messages(random, random.below(12), config.payload_max_bytes, 6'000);
  pair.exchange(from_a, from_b);
  const bool is_complete = pair.run(120'000'000);
  std::string state;
  if (!is_complete)
    state =
        "a: " + pair.a.lost + " " + pair.a.flow().describe() + "; b: " + pair.b.lost + " " + pair.b.flow().describe();
  return Outcome{is_complete, pair.network.trace_hash(), pair.network.now_us(), state};
}

void check_deliveries(uint64_t first_seed, uint64_t last_seed) {
  for (uint64_t seed = first_seed; seed <= last_seed; ++seed) {
    CAPTURE(seed);
    const Outcome outcome = random_run(seed);
    INFO(outcome.state);
    REQUIRE(outcome.is_complete);
  }
}

}  // namespace

TEST_CASE("A run is a pure function of its seed") {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    CAPTURE(seed);
    const Outcome first = random_run(seed), second = random_run(seed);
    CHECK(first.trace_hash == second.trace_hash);
    CHECK(first.now_us == second.now_us);
    CHECK(first.trace_hash != random_run(seed + 1'000).trace_hash);
  }
}

TEST_CASE("Soak: 200 random networks and exchanges deliver every byte once") { check_deliveries(1, 200); }

TEST_CASE("Soak: 5,000 others" * doctest::test_suite("long")) { check_deliveries(201, 5'200); }
