// SPDX-License-Identifier: Apache-2.0
// Ranks whose threads do not run for a while. A pause by the scheduler must not be taken for a network fault.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>

#include "sim_peer.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

constexpr uint32_t RAILS = 4;

flow::FlowConfig config_of(uint32_t path_count) {
  return {.path_count = path_count, .window_bytes = 2 << 20, .ack_every_packets = 64, .rail_count = RAILS};
}

// Slices of 1 to 20 ms, at any moment.
std::vector<SimPause> random_pauses(SimRandom& random, uint64_t until_us) {
  std::vector<SimPause> pauses;
  for (uint64_t at_us = random.below(3'000); at_us < until_us;) {
    const uint64_t end_us = at_us + 1'000 + random.below(20'000);
    const auto where = static_cast<SimPause::Where>(random.below(3));
    pauses.push_back({at_us, end_us, where, static_cast<uint32_t>(random.below(RAILS))});
    at_us = end_us + random.below(4'000);
  }
  return pauses;
}

}  // namespace

TEST_CASE("Threads that do not run are no loss") {
  const SimLinkConfig good{.delay_us = 25, .rate_bytes_per_s = 1'000'000'000};
  const std::vector<SimLinkConfig> links(RAILS, good);
  uint64_t retransmitted = 0, probes = 0, changes = 0, sent = 0;
  for (const uint32_t path_count : {4u, 16u})
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      SimRandom random(seed);
      SimPair pair(seed, config_of(path_count), links, links);
      pair.network.set_scribbling(false);
      for (uint32_t rank = 0; rank < 2; ++rank)
        if (seed % 3 != rank) pair.network.set_pauses(rank, RAILS, random_pauses(random, 100'000));
      pair.exchange(bulk(8, 1 << 20), bulk(8, 1 << 20));
      CAPTURE(seed);
      REQUIRE(pair.run(SECOND_US));
      for (SimPeer* peer : {&pair.a, &pair.b}) {
        const flow::FlowCounters& counters = peer->flow().counters();
        retransmitted += counters.retransmitted_packets;
        probes += counters.tail_probe_packets;
        changes += counters.path_state_changes;
        sent += counters.data_packets_sent;
      }
    }
  MESSAGE(sent, " sent, ", retransmitted, " again, ", probes, " of them probes");
  CHECK(retransmitted == probes);
  CHECK(changes == 0);
  CHECK(probes < sent / 500);
}

TEST_CASE("A rail that dies while threads do not run is found dead all the same") {
  constexpr uint64_t DARK_US = 2'000;
  const SimLinkConfig good{.delay_us = 25, .rate_bytes_per_s = 1'000'000'000};
  SimLinkConfig dark = good;
  dark.black_holes.push_back({DARK_US, UINT64_MAX});
  std::array<uint64_t, RAILS> longest_us{};
  uint64_t seed = 0;
  for (const uint32_t path_count : {4u, 16u})
    for (const uint32_t dark_count : {1u, 3u}) {
      ++seed;
      CAPTURE(path_count);
      CAPTURE(dark_count);
      CAPTURE(seed);
      SimRandom random(seed);
      std::vector<SimLinkConfig> links(RAILS, good);
      std::fill_n(links.begin() + 1, dark_count, dark);
      SimPair pair(seed, config_of(path_count), links, links);
      pair.network.set_scribbling(false);
      // One rank pauses around the moment of the fault.
      const uint64_t from_us = DARK_US - random.below(1'000), until_us = DARK_US + 1'000 + random.below(9'000);
      const auto where = static_cast<SimPause::Where>(random.below(3));
      pair.network.set_pauses(seed % 2, RAILS,
                              {{from_us, until_us, where, static_cast<uint32_t>(random.below(RAILS))}});
      pair.exchange(bulk(6, 3 << 20), bulk(6, 3 << 20));
      uint64_t found_us = 0, packets = 0, moved_us = 0, stall_us = 0;
      const flow::FlowCounters &a = pair.a.flow().counters(), &b = pair.b.flow().counters();
      const bool is_done = pair.network.run(SECOND_US, [&] {
        const uint64_t now_us = pair.network.now_us();
        if (a.data_packets_received + b.data_packets_received != packets) {
          // From the end of the pause on, because nobody could do anything before.
          if (now_us > until_us) stall_us = std::max(stall_us, now_us - std::max(moved_us, until_us));
          packets = a.data_packets_received + b.data_packets_received;
          moved_us = now_us;
        }
        if (found_us == 0 && a.path_state_changes >= dark_count * path_count / RAILS) found_us = now_us;
        return pair.a.done() && pair.b.done();
      });
      REQUIRE(is_done);
      CHECK(found_us > DARK_US);
      longest_us[dark_count] = std::max(longest_us[dark_count], stall_us);
      CHECK(found_us < until_us + 50'000);
      // What was on the dead rails, and at most one window after each verdict. Nothing is sent again and again.
      const uint64_t window_packets = (2 << 20) / 4'096;
      CHECK(a.retransmitted_packets + b.retransmitted_packets < 4 * window_packets);
    }
  MESSAGE("one rail dead: stalls up to ", longest_us[1], " us; three: ", longest_us[3], " us");
  CHECK(longest_us[1] < 5'000);
}
