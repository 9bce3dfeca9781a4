// SPDX-License-Identifier: Apache-2.0
// Paths that die, heal, slow down and are marked: what it costs and who notices.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>

#include "flow/path_policy.hpp"
#include "sim_peer.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

flow::FlowConfig config_with(std::string_view policy, uint32_t path_count = 4, uint32_t rail_count = 1) {
  return {.path_count = path_count, .window_bytes = 2 << 20, .rail_count = rail_count, .path_policy = policy};
}

// The longest time without a new packet at b between the first one and the end of the exchange.
struct Stall {
  uint64_t longest_us = 0, last_us = 0, packets = 0;
  void note(const SimPair& pair, const flow::FlowCounters& counters) {
    const uint64_t now_us = pair.network.now_us();
    if (packets != 0) longest_us = std::max(longest_us, now_us - last_us);
    if (counters.data_packets_received == packets) return;
    packets = counters.data_packets_received;
    last_us = now_us;
  }
};

}  // namespace

TEST_CASE("A plane that goes dark stalls its flow for less than 5 ms, and is used again soon after it heals") {
  constexpr uint64_t DARK_US = 3'000, HEALED_US = 15'000;
  struct Case {
    std::string_view policy;
    uint64_t delay_us;
    size_t dead_count;
    uint32_t path_count;
  };
  // Each value of each. The model of faults has planes that go dark in networks of all kinds.
  for (const Case& one : {Case{"round_robin", 25, 1, 4}, Case{"round_robin", 250, 3, 16}, Case{"reps", 25, 3, 16}}) {
    CAPTURE(one.policy);
    CAPTURE(one.delay_us);
    CAPTURE(one.dead_count);
    CAPTURE(one.path_count);
    const SimLinkConfig good{.delay_us = one.delay_us, .rate_bytes_per_s = 1'000'000'000};
    SimLinkConfig dark = good;
    dark.black_holes.push_back({DARK_US, HEALED_US});
    std::vector<SimLinkConfig> links(4, good);
    std::fill_n(links.begin() + 1, one.dead_count, dark);
    SimPair pair(one.dead_count, config_with(one.policy, one.path_count, 4), links, links);
    pair.network.set_scribbling(false);
    pair.exchange(bulk(20, 4 << 20), {});
    Stall stall;
    uint64_t readmitted_us = 0;
    const flow::FlowCounters& a = pair.a.flow().counters();
    const bool is_done = pair.network.run(SECOND_US, [&] {
      stall.note(pair, pair.b.flow().counters());
      if (readmitted_us == 0 && a.paths_readmitted >= one.dead_count * one.path_count / 4)
        readmitted_us = pair.network.now_us();
      return pair.a.done() && pair.b.done();
    });
    REQUIRE(is_done);
    CHECK(stall.longest_us < 5'000);
    CHECK(readmitted_us > HEALED_US);
    CHECK(readmitted_us < HEALED_US + 200'000);
    // A dead path costs almost nothing.
    CHECK(a.path_probe_packets < 20 * one.path_count);
    CHECK(a.local_ack_timeout_err == 0);
  }
}

TEST_CASE("The paths of a dead rail are given up together") {
  const SimLinkConfig good{.delay_us = 50, .rate_bytes_per_s = 1'000'000'000};
  SimLinkConfig dark = good;
  dark.black_holes.push_back({4'000, UINT64_MAX});
  SimPair pair(1, config_with("round_robin", 64, 4), {good, dark, good, good}, {good, dark, good, good});
  pair.network.set_scribbling(false);
  pair.exchange(bulk(12, 4 << 20), {});
  uint64_t first_us = 0, all_us = 0;
  const auto count_bad = [&] {
    const std::string text = pair.a.flow().describe();
    return 64 - std::stoi(text.substr(text.find('(') + 1));
  };
  uint64_t changes = 0;
  const bool is_done = pair.network.run(SECOND_US, [&] {
    if (pair.a.flow().counters().path_state_changes != changes) {
      changes = pair.a.flow().counters().path_state_changes;
      const int bad = count_bad();
      if (bad > 0 && first_us == 0) first_us = pair.network.now_us();
      if (bad == 16 && all_us == 0) all_us = pair.network.now_us();
    }
    return pair.a.done() && pair.b.done();
  });
  REQUIRE(is_done);
  REQUIRE(first_us > 4'000);
  // At once, not one round trip after the other.
  CHECK(all_us == first_us);
}

TEST_CASE("Random loss of single packets makes no path bad for long and costs little") {
  // The goodput at 0.1, 1 and 5 % loss, relative to no loss. It must reach 97, 92 and 75 %.
  const std::map<double, double> least_kept{{0.001, 0.97}, {0.01, 0.92}, {0.05, 0.75}};
  const auto run = [&](double loss_fraction, uint64_t seed) {
    const std::vector<SimLinkConfig> links(
        4, {.delay_us = 50, .rate_bytes_per_s = 1'000'000'000, .loss_fraction = loss_fraction});
    flow::FlowConfig config = config_with("round_robin");
    config.ack_every_packets = 64;
    SimPair pair(seed, config, links, links);
    pair.network.set_scribbling(false);
    pair.exchange(bulk(3, 8 << 20), bulk(3, 8 << 20));
    REQUIRE(pair.run(SECOND_US));
    return static_cast<double>(pair.network.now_us());
  };
  const double lossless_us = run(0, 1);
  for (const auto& [loss_fraction, least] : least_kept) {
    CAPTURE(loss_fraction);
    const double kept = lossless_us / run(loss_fraction, 1);
    MESSAGE("loss of ", loss_fraction, " keeps ", kept);
    CHECK(kept >= least);
  }
}

TEST_CASE("A lost tail is found by the mark behind it, without a timer") {
  const SimLinkConfig good{.delay_us = 50, .rate_bytes_per_s = 1'000'000'000};
  SimLinkConfig lossy = good;
  lossy.loss_fraction = 0.05;
  uint64_t probes = 0, timeouts = 0, lost = 0;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    SimPair pair(seed, config_with("round_robin"), std::vector(4, lossy), std::vector(4, good));
    pair.b.max_open_receives = 1;
    pair.exchange(bulk(10, 1 << 20), {});
    REQUIRE(pair.run(SECOND_US));
    lost += pair.network.counters().lost;
    probes += pair.a.flow().counters().tail_probe_packets;
    timeouts += pair.a.flow().counters().local_ack_timeout_err;
  }
  // About a third of the hundred messages lose something of their tail.
  CHECK(lost > 500);
  CHECK(probes < 10);
  CHECK(timeouts == 0);
}

TEST_CASE("REPS gives a slow path less, and comes back to it when it is fast again") {
  flow::Paths paths(4, 1);
  for (uint32_t path = 0; path < 4; ++path) paths[path].round_trip.add_sample(path == 2 ? 900 : 100);
  const auto policy = flow::make_path_policy("reps", 4, 0);
  std::array<uint32_t, 4> chosen{};
  for (uint64_t now_us = 0; now_us < 4'000; ++now_us) {
    const uint32_t path = policy->choose(now_us, paths, flow::Paths::NONE);
    ++chosen[path];
    policy->on_feedback({now_us, path, 15, 0, 100, 100});
  }
  CHECK(chosen[2] > 0);
  CHECK(chosen[2] < chosen[0] / 2);
  // Marked arrivals put nothing into the ring, so only exploring finds the path.
  chosen = {};
  for (uint64_t now_us = 4'000; now_us < 8'000; ++now_us) {
    const uint32_t path = policy->choose(now_us, paths, flow::Paths::NONE);
    ++chosen[path];
    policy->on_feedback({now_us, path, 15, path == 1 ? 15u : 0u, 100, 100});
  }
  CHECK(chosen[1] > 0);
  CHECK(chosen[1] < chosen[0] / 2);
}

TEST_CASE("REPS recycles by the batches that a flow really sends, down to single packets") {
  flow::Paths paths(16, 1);
  const auto policy = flow::make_path_policy("reps", 16, 0);
  std::array<uint32_t, 16> chosen{};
  // As a NIC sends: one packet for each choice. Half of the paths are marked all the time.
  for (uint64_t now_us = 0; now_us < 400; ++now_us) {
    const uint32_t path = policy->choose(now_us, paths, flow::Paths::NONE);
    ++chosen[path];
    policy->on_feedback({now_us, path, 1, path % 2, 100, 100});
  }
  uint32_t marked = 0;
  for (uint32_t path = 1; path < 16; path += 2) marked += chosen[path];
  // Only exploring finds them, with every eighth choice, and half of these. At first all choices explore.
  CHECK(marked < 400 / 16 + 16);
}

TEST_CASE("No policy offers a bad path, and a retransmission takes another rail") {
  for (const std::string_view name : {"round_robin", "reps"}) {
    CAPTURE(name);
    flow::Paths paths(8, 4);
    const auto policy = flow::make_path_policy(name, 8, 3);
    paths[5].state = flow::PathState::bad;
    paths[6].state = flow::PathState::skip;
    paths[6].until_us = 500;
    for (uint64_t now_us = 0; now_us < 400; ++now_us) {
      const uint32_t path = policy->choose(now_us, paths, 1);
      CHECK(path != 5);
      CHECK(path != 6);
      CHECK(paths.rail_of(path) != 1);
      policy->on_feedback({now_us, path, 15, 0, 0, 0});
    }
    bool is_seen = false;
    for (uint64_t now_us = 500; now_us < 600; ++now_us)
      is_seen |= policy->choose(now_us, paths, flow::Paths::NONE) == 6;
    CHECK(is_seen);
  }
}

// As many controls as paths, and a policy that takes the paths in turn: each repetition would begin on the same path.
TEST_CASE("Adverts that fill several controls arrive, whichever path is dead in their direction") {
  const SimLinkConfig good{.delay_us = 25, .rate_bytes_per_s = 1'000'000'000};
  for (uint32_t dead = 0; dead < 3; ++dead) {
    CAPTURE(dead);
    std::vector<SimLinkConfig> back(3, good);
    back[dead].black_holes.push_back({0, UINT64_MAX});
    flow::FlowConfig config = config_with("round_robin", 3, 3);
    config.payload_max_bytes = 1'024;
    SimPair pair(1, config, std::vector<SimLinkConfig>(3, good), back);
    pair.b.max_open_receives = 60;
    pair.exchange(bulk(60, 8), {});
    CHECK(pair.run(SECOND_US / 10));
    CHECK(pair.b.flow().counters().control_packets_sent < 100);
  }
}
