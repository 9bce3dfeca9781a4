// SPDX-License-Identifier: Apache-2.0
// Messages that come before their receives: what is kept, what is held up, and what passes them.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sennit/core.h"
#include "tests/triangle.hpp"

using namespace sennit;
using test::pattern;
using test::SIGNATURE;
using test::Triangle;

TEST_CASE("too many early messages are held in the lane, not in memory without end") {
  Triangle net;
  const std::vector<char> data = pattern(64, 1);
  const size_t count = 300'000;  // 19 MB: more than is kept
  for (size_t i = 0; i < count; ++i) net.send(0, 1, 1, P2P_KEY | i, data);
  net.pump();
  size_t matched = 0;
  std::vector<char> got(64);
  for (size_t i = 0; i < count; ++i) {
    net.receive(1, 1, 0, P2P_KEY | i, got);
    net.pump();
    ++matched;
  }
  CHECK(net.clients[1].received.size() == matched);
}

TEST_CASE("early messages without data count against the limit, too") {
  Triangle net;
  const auto request = [&](uint64_t key) {
    return net.mailboxes[0]->on_eager(1, {P2P_KEY | key, SIGNATURE, uint64_t{1} << 40}, EAGER_REQUEST, nullptr);
  };
  const auto empty = [&] { return net.mailboxes[0]->on_eager(1, {P2P_KEY | 2, SIGNATURE, 0}, EAGER_DATA, nullptr); };
  REQUIRE(empty());
  uint64_t held = 0;
  while (request(1)) {
    ++held;
    REQUIRE(held < 1'000'000);
  }
  CHECK(held > 1'000);
  // One message is taken, so there is room for another.
  std::vector<char> nothing;
  net.receive(0, 1, 1, P2P_KEY | 2, nothing);
  CHECK(empty());
  CHECK_FALSE(empty());
}

TEST_CASE("a peer that floods takes no memory from the messages of another") {
  Triangle net;
  const std::vector<char> data = pattern(64, 1);
  const auto arrive = [&](uint32_t peer, uint64_t key) {
    const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
    return net.mailboxes[0]->on_eager(peer, {P2P_KEY | key, SIGNATURE, data.size()}, EAGER_DATA, bytes);
  };
  while (arrive(1, 1)) {
  }
  CHECK(arrive(2, 1));
}

TEST_CASE("a message that is needed overtakes all unexpected ones that its peer sent before it") {
  for (const uint32_t from : {0u, SENNIT_ANY_PEER}) {
    CAPTURE(from);
    Triangle net;
    const std::vector<char> data = pattern(64, 1), needed = pattern(64, 2);
    for (size_t i = 0; i < 300'000; ++i) net.send(0, 1, 1, P2P_KEY | 1, data);  // more than is kept unasked
    net.send(0, 2, 1, P2P_KEY | 2, needed);
    net.pump();
    CHECK(net.clients[0].sent.size() == 300'001);  // the lane of this test holds any number
    std::vector<char> got(64);
    net.receive(1, 3, from, P2P_KEY | 2, got);
    net.pump();
    REQUIRE(net.clients[1].received.size() == 1);
    CHECK(got == needed);
  }
}

TEST_CASE("an advert that a large send waits for passes early messages, too") {
  Triangle net;
  const std::vector<char> small = pattern(64, 1), large = pattern(5'000, 2);
  for (size_t i = 0; i < 300'000; ++i) net.send(0, 1, 1, P2P_KEY | 1, small);
  net.pump();
  std::vector<char> got(5'000);
  net.send(1, 2, 0, 7, large);
  net.receive(0, 3, 1, 7, got);
  net.pump();
  CHECK(got == large);
}

TEST_CASE("the end of a send that was lent passes early messages, too, whichever side came first") {
  for (const bool advert_is_first : {true, false}) {
    CAPTURE(advert_is_first);
    Triangle net;
    net.lanes[{1, 0}]->lends = true;
    const std::vector<char> small = pattern(64, 1), large = pattern(5'000, 2);
    std::vector<char> got(5'000);
    if (advert_is_first) {
      net.receive(0, 3, 1, 7, got);
      net.pump();
      net.send(1, 2, 0, 7, large);
    } else {
      net.send(1, 2, 0, 7, large);
      net.receive(0, 3, 1, 7, got);
      net.lanes[{0, 1}]->pump();
    }
    for (size_t i = 0; i < 300'000; ++i) net.send(0, 1, 1, P2P_KEY | 1, small);  // more than is kept unasked
    net.pump();
    CHECK(got == large);
    CHECK(net.clients[1].sent == std::vector<uint32_t>{2});
    // Nothing waits any more, so more is held.
    net.send(0, 1, 1, P2P_KEY | 1, small);
    net.pump();
    CHECK_FALSE(net.mailboxes[1]->on_eager(0, {P2P_KEY | 1, SIGNATURE, 0}, EAGER_DATA, nullptr));
  }
}

TEST_CASE("any amount of early messages is kept while something waits behind them") {
  Triangle net;
  std::vector<char> got(64);
  net.receive(0, 1, 1, P2P_KEY | 2, got);
  const std::vector<std::byte> early(48 << 20);
  for (int i = 0; i < 6; ++i)  // 288 MiB
    REQUIRE(net.mailboxes[0]->on_eager(1, {P2P_KEY | 1, SIGNATURE, early.size()}, EAGER_DATA, early.data()));
  net.send(1, 1, 0, P2P_KEY | 2, pattern(64, 2));
  net.pump();
  CHECK(got == pattern(64, 2));
}

TEST_CASE("of a peer that is lost, whole early messages are received, and a request fails at once") {
  for (const uint32_t from : {1u, SENNIT_ANY_PEER}) {
    CAPTURE(from);
    Triangle net;
    const std::vector<char> small = pattern(64, 1), large = pattern(5'000, 2);
    net.send(1, 1, 0, P2P_KEY | 1, small);
    net.send(1, 2, 0, P2P_KEY | 2, large);
    net.pump();
    net.mailboxes[0]->on_peer_lost(1, "process ended");
    std::vector<char> got_small(64), got_large(5'000);
    net.receive(0, 3, from, P2P_KEY | 1, got_small);
    CHECK(got_small == small);
    CHECK(net.mailboxes[0]->failure() == nullptr);
    net.receive(0, 4, from, P2P_KEY | 2, got_large);
    const MailboxFailure* const failure = net.mailboxes[0]->failure();
    REQUIRE(failure != nullptr);
    CHECK(failure->kind == MailboxFailure::Kind::peer_lost);
    CHECK(failure->peer == 1);
    CHECK(failure->reason == "process ended");
  }
}
