// SPDX-License-Identifier: Apache-2.0
// A peer that somebody waits for outside of bulk messages: asked for a sign of life, and given up if it gives none.
#include <doctest/doctest.h>

#include "flow/silence.hpp"
#include "sim_peer.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

constexpr uint64_t TIMEOUT_US = 2'000'000;
const flow::FlowConfig CONFIG{.path_count = 4, .payload_max_bytes = 512, .peer_timeout_us = TIMEOUT_US};
const SimLinkConfig LINK{.delay_us = 20};

SimLinkConfig dead_link(uint64_t from_us = 0) {
  SimLinkConfig link = LINK;
  link.black_holes.push_back({from_us, UINT64_MAX});
  return link;
}

// The program of `a` waits for a message of `b` until `until_us`, and looks as often as the mailbox does.
void wait_in_a(SimPair& pair, uint64_t until_us) {
  while (pair.network.now_us() < until_us && pair.a.lost.empty()) {
    const uint64_t look_us = (pair.network.now_us() / flow::LOOK_MAX_US + 1) * flow::LOOK_MAX_US;
    pair.network.advance(look_us);
    pair.a.flow().expect(look_us);
    pair.network.kick();
  }
}

}  // namespace

TEST_CASE("A peer that is waited for and silent is lost within its timeout, and the error says what was tried") {
  SimPair pair(1, CONFIG, dead_link(), dead_link());
  wait_in_a(pair, 10 * SECOND_US);
  CHECK(pair.a.lost.starts_with("gave no sign of life for "));
  CHECK(pair.a.lost.find("asked ") != std::string::npos);
  CHECK(pair.a.lost.find("over all 4 paths") != std::string::npos);
  CHECK(pair.a.lost.find("never heard from since the group was made") != std::string::npos);
  CHECK(pair.network.now_us() >= TIMEOUT_US - TIMEOUT_US / 10);
  CHECK(pair.network.now_us() <= TIMEOUT_US + TIMEOUT_US / 10);
  // The text about its paths and round trip must say no more than is known.
  CHECK(pair.a.flow().describe().find("4 paths (never heard from") != std::string::npos);
  CHECK(pair.a.flow().describe().find("no round trip measured yet") != std::string::npos);
}

TEST_CASE("A peer that does nothing but answer is waited for without end, and asked ever more rarely") {
  SimPair pair(2, CONFIG, LINK, LINK);
  wait_in_a(pair, 3 * TIMEOUT_US);
  const uint64_t asked = pair.a.flow().counters().control_packets_sent;
  CHECK(asked > 0);
  wait_in_a(pair, 103 * TIMEOUT_US);
  CHECK(pair.a.lost.empty());
  // At most one question in an eighth of the timeout, though it looks five times as often.
  CHECK(pair.a.flow().counters().control_packets_sent - asked <= 100 * 8 + 1);
  CHECK(pair.b.flow().counters().control_packets_sent <= 2 * pair.a.flow().counters().control_packets_sent);
  CHECK(pair.a.flow().describe().find("4 good") != std::string::npos);
}

TEST_CASE("Nobody asks where nobody waits") {
  SimPair pair(3, CONFIG, LINK, LINK);
  pair.exchange({{1, 100, true}}, {{2, 100, true}});
  REQUIRE(pair.run(SECOND_US));
  pair.network.advance(pair.network.now_us() + SECOND_US);
  const uint64_t sent = pair.network.counters().sent;
  pair.network.advance(100 * SECOND_US);
  CHECK(pair.network.counters().sent == sent);
  CHECK(pair.a.lost.empty());
}

TEST_CASE("A peer that is left on one path of many, one way or both, is not given up") {
  for (uint32_t there = 0; there < 4; ++there) {
    for (uint32_t back = 0; back < 4; ++back) {
      CAPTURE(there);
      CAPTURE(back);
      std::vector<SimLinkConfig> links_there(4, dead_link(10)), links_back(4, dead_link(10));
      links_there[there] = links_back[back] = LINK;
      SimPair pair(4, CONFIG, links_there, links_back);
      wait_in_a(pair, 20 * TIMEOUT_US);
      CHECK(pair.a.lost.empty());
    }
  }
}

TEST_CASE("A lossy network is no death") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    SimLinkConfig lossy = LINK;
    lossy.loss_fraction = 0.5;
    SimPair pair(seed, CONFIG, lossy, lossy);
    wait_in_a(pair, 20 * TIMEOUT_US);
    CHECK(pair.a.lost.empty());
  }
}

TEST_CASE("A process that was stopped itself does not blame its peer for the time in between") {
  SimPair pair(5, CONFIG, LINK, LINK);
  wait_in_a(pair, TIMEOUT_US / 2);
  pair.network.advance(pair.network.now_us() + 100 * TIMEOUT_US);
  pair.a.flow().expect(pair.network.now_us());
  pair.network.kick();
  CHECK(pair.a.lost.empty());
  wait_in_a(pair, pair.network.now_us() + 3 * TIMEOUT_US);
  CHECK(pair.a.lost.empty());
}

TEST_CASE("A peer that said goodbye is not waited for") {
  SimPair pair(6, CONFIG, LINK, LINK);
  pair.b.flow().close();
  pair.network.kick();
  wait_in_a(pair, TIMEOUT_US / 2);
  CHECK(pair.a.lost == "left the group");
}

TEST_CASE("Silence is counted from the last word, and not faster than time goes by") {
  flow::Silence silence(10'000'000);
  using Step = flow::Silence::Step;
  uint64_t now_us = 5'000'000, last_us = 0;
  uint32_t questions = 0, everywhere = 0;
  silence.on_heard(now_us);
  for (Step step = Step::wait; step != Step::give_up; now_us += 50'000) {
    step = silence.look(now_us);
    questions += step == Step::ask || step == Step::ask_everywhere;
    everywhere += step == Step::ask_everywhere;
    last_us = now_us;
    REQUIRE(now_us < 60'000'000);
  }
  CHECK(last_us - 5'000'000 == 9'500'000);
  CHECK(questions == silence.questions());
  CHECK(questions >= 12);
  CHECK(questions <= 20);
  CHECK(everywhere >= 5);
  silence.on_heard(now_us);
  CHECK(silence.silent_us() == 0);
  CHECK(silence.look(now_us + 1) == Step::wait);
}
