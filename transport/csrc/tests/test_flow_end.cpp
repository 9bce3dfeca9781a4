// SPDX-License-Identifier: Apache-2.0
// How a flow ends: goodbye, abort, a peer that is gone, and a peer that is only slow.
#include <doctest/doctest.h>

#include "flow/control.hpp"
#include "sim_peer.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

const flow::FlowConfig CONFIG{.payload_max_bytes = 512, .window_bytes = 32'768, .peer_timeout_us = 2'000'000};
const SimLinkConfig LINK{.delay_us = 20, .rate_bytes_per_s = 100'000'000};

const std::vector<TestMessage> LARGE{{1, 400'000, false}, {2, 400'000, false}};

}  // namespace

TEST_CASE("Goodbye after the work is done is no loss, until more is asked for") {
  SimPair pair(1, CONFIG, LINK, LINK);
  pair.exchange(LARGE, LARGE);
  REQUIRE(pair.run(10 * SECOND_US));
  pair.a.flow().close();
  pair.network.run(pair.network.now_us() + SECOND_US, [] { return false; });
  CHECK(pair.b.lost.empty());
  CHECK(pair.b.flow().idle());
  CHECK_FALSE(pair.b.flow().send_eager({7, 7, 0}, 0, nullptr, pair.network.now_us()));
  pair.b.progress(pair.network.now_us());
  CHECK(pair.b.lost == "said goodbye before this message");
}

TEST_CASE("Goodbye in the middle of the work is a loss") {
  SimPair pair(2, CONFIG, LINK, LINK);
  pair.exchange(LARGE, {});
  pair.network.run(2'000, [] { return false; });
  pair.b.flow().close();
  pair.network.run(10 * SECOND_US, [&] { return !pair.a.lost.empty(); });
  CHECK(pair.a.lost == "said goodbye while messages were outstanding");
  CHECK(pair.a.flow().idle());
}

TEST_CASE("Abort reaches the peer with its reason, through loss, and no user memory is touched afterwards") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    SimLinkConfig lossy = LINK;
    lossy.loss_fraction = 0.4;
    SimPair pair(seed, CONFIG, lossy, lossy);
    pair.exchange(LARGE, LARGE);
    pair.network.run(3'000, [] { return false; });
    pair.a.flow().abort("rank 3 raised ValueError");
    CHECK(pair.a.flow().idle());
    std::array<flow::DataOut, 15> batch;
    uint32_t path;
    CHECK(pair.a.flow().poll_data(pair.network.now_us(), batch, path) == 0);
    std::array<flow::Placement, 16> places;
    CHECK(pair.a.flow().predict(places) == 0);
    pair.network.run(60 * SECOND_US, [&] { return !pair.b.lost.empty(); });
    CHECK(pair.b.lost == "aborted: rank 3 raised ValueError");
    CHECK(pair.b.flow().predict(places) == 0);
  }
}

TEST_CASE("A peer's reason is a text whatever its bytes, and is not cut within a character") {
  for (const auto& [said, heard] : {std::pair<std::string, std::string>{"caf\xC3\xA9", "caf\xC3\xA9"},
                                    {"caf\xC3", "caf?"},
                                    {std::string("a\0b\xFF", 4), "a?b?"}}) {
    SimPair pair(3, CONFIG, LINK, LINK);
    pair.a.flow().abort(said);
    pair.network.run(SECOND_US, [&] { return !pair.b.lost.empty(); });
    CHECK(pair.b.lost == "aborted: " + heard);
  }
  std::string text;
  while (text.size() < 600) text += "\xE2\x82\xAC";  // three bytes each, and 512 is no multiple of three
  SimPair pair(3, CONFIG, LINK, LINK);
  pair.a.flow().abort(text);
  pair.network.run(SECOND_US, [&] { return !pair.b.lost.empty(); });
  CHECK(pair.b.lost == "aborted: " + text.substr(0, 510));
}

TEST_CASE("A rank that goes on after its goodbye is told why the other side aborted") {
  SimPair pair(6, CONFIG, LINK, LINK);
  pair.a.flow().close();
  pair.network.run(1'000, [] { return false; });
  pair.b.flow().abort("rank 3 raised ValueError");
  pair.b.flow().on_data(20'000, 0, 0, 32);
  pair.network.run(10 * SECOND_US, [&] { return !pair.a.lost.empty(); });
  CHECK(pair.a.lost == "aborted: rank 3 raised ValueError");
}

TEST_CASE("A peer that falls silent in the middle of a message is lost, on both sides") {
  SimLinkConfig cut = LINK;
  cut.black_holes.push_back({2'000, UINT64_MAX});
  SimPair pair(3, CONFIG, cut, cut);
  pair.exchange(LARGE, {});
  pair.network.run(10 * SECOND_US, [&] { return !pair.a.lost.empty() && !pair.b.lost.empty(); });
  CHECK(pair.a.lost.starts_with("gave no sign of life for "));
  CHECK(pair.b.lost.starts_with("gave no sign of life for "));
  CHECK(pair.network.now_us() < 3 * SECOND_US);
}

TEST_CASE("A peer that is slow to answer adverts and eager messages is not lost") {
  SimLinkConfig late = LINK;
  late.black_holes.push_back({0, 8 * SECOND_US});
  SimPair pair(4, CONFIG, late, late);
  pair.exchange({{1, 100, true}, {2, 100'000, false}}, {{3, 100, true}, {4, 100'000, false}});
  REQUIRE(pair.run(20 * SECOND_US));
  CHECK(pair.a.lost.empty());
  CHECK(pair.b.lost.empty());
  // With back-off, so that a slow peer is not flooded.
  CHECK(pair.a.flow().counters().control_packets_sent < 60);
  CHECK(pair.a.flow().counters().retransmitted_packets < 60);
}

TEST_CASE("What the port knows of a dead peer is passed on") {
  SimPair pair(5, CONFIG, LINK, LINK);
  pair.exchange(LARGE, {});
  pair.network.run(1'000, [] { return false; });
  pair.a.flow().on_peer_failed("connection refused");
  pair.a.progress(pair.network.now_us());
  CHECK(pair.a.lost == "connection refused");
}

TEST_CASE("A transfer that does not fit its advert loses the peer instead of writing past it") {
  SimPair pair(6, CONFIG, LINK, LINK);
  std::byte memory[64]{};
  pair.b.flow().advertise(1, {9, 9, 64}, memory, 5, 0);
  flow::Event event{};
  pair.network.kick();
  std::array<std::byte, flow::CONTROL_MAX_BYTES> control;
  uint32_t path;
  pair.b.flow().advertise(2, {10, 10, 32}, memory, 6, 0);
  const size_t size_bytes = pair.b.flow().poll_control(0, control, path);
  REQUIRE(size_bytes > 0);
  // Without the first advert, the second shows a gap, so nothing is offered.
  pair.a.flow().on_control(0, 0, std::span(control).first(size_bytes));
  CHECK_FALSE(pair.a.flow().poll_event(event));
}

namespace {

// A receiver's adverts, control by control, and a sender that has seen none of them.
struct Adverts {
  static constexpr uint32_t COUNT = 3;

  Adverts() {
    for (uint32_t i = 0; i < COUNT; ++i) {
      receiver.advertise(i, {10 + i, 1, 64}, memory.data(), 5 + i, 0);
      sizes[i] = receiver.poll_control(0, controls[i], path);
      REQUIRE(sizes[i] > 0);
    }
  }
  void deliver(uint64_t now_us, uint32_t number) {
    sender.on_control(now_us, number % CONFIG.path_count, std::span(controls[number]).first(sizes[number]));
  }
  // The keys of the packets that the sender may send by now.
  std::vector<uint64_t> offered() {
    std::vector<uint64_t> keys;
    for (flow::Event event{}; sender.poll_event(event);) keys.push_back(event.header.key);
    return keys;
  }

  SimPair pair{7, CONFIG, LINK, LINK};
  flow::Flow &receiver = pair.b.flow(), &sender = pair.a.flow();
  std::array<std::byte, 64> memory{};
  std::array<std::array<std::byte, flow::CONTROL_MAX_BYTES>, COUNT> controls;
  std::array<size_t, COUNT> sizes{};
  uint32_t path = 0;
};

}  // namespace

TEST_CASE("Adverts that overtake each other on several paths wait for those before them, and for nothing else") {
  Adverts adverts;
  adverts.deliver(100, 2);
  CHECK(adverts.offered().empty());
  adverts.deliver(110, 1);
  adverts.deliver(115, 1);  // a duplicate
  CHECK(adverts.offered().empty());
  adverts.deliver(120, 0);
  CHECK(adverts.offered() == std::vector<uint64_t>{10, 11, 12});
  adverts.deliver(130, 2);
  CHECK(adverts.offered().empty());
}

TEST_CASE("A lost advert is asked for as soon as a later one is there, however many follow") {
  Adverts adverts;
  std::array<std::byte, flow::CONTROL_MAX_BYTES> control;
  adverts.deliver(100, 1);
  const size_t answer_bytes = adverts.sender.poll_control(100 + CONFIG.ack_delay_us, control, adverts.path);
  REQUIRE(answer_bytes > 0);
  // The receiver advertises all the time, which proves nothing about the first advert.
  adverts.receiver.advertise(3, {13, 1, 64}, adverts.memory.data(), 9, 599);
  std::array<std::byte, flow::CONTROL_MAX_BYTES> again;
  REQUIRE(adverts.receiver.poll_control(599, again, adverts.path) > 0);
  adverts.receiver.on_control(600, 0, std::span(control).first(answer_bytes));
  const size_t again_bytes = adverts.receiver.poll_control(600, again, adverts.path);
  REQUIRE(again_bytes > 0);
  adverts.sender.on_control(620, 0, std::span(again).first(again_bytes));
  CHECK(adverts.offered() == std::vector<uint64_t>{10, 11, 12, 13});
}

TEST_CASE("An early advert that cannot follow its predecessors is dropped when its turn comes") {
  Adverts adverts;
  flow::ControlWriter writer(adverts.controls[1]);
  writer.header.advert_first = 1;
  SUBCASE("the rest of a message of which nothing is left to advertise") {
    REQUIRE(writer.add_advert({1, 2, 64, false, 0, 0, 0}));
  }
  SUBCASE("more keys than the peer has devices") {
    flow::Keys keys = 2;
    keys.count = 2;
    REQUIRE(writer.add_advert({1, keys, 64, true, 11, 0, 64}));
  }
  const size_t bad_bytes = writer.finish();
  adverts.sender.on_control(100, 0, std::span(adverts.controls[1]).first(bad_bytes));
  adverts.deliver(110, 0);
  CHECK(adverts.offered() == std::vector<uint64_t>{10});
  CHECK(adverts.sender.counters().bad_control == 0);
}
