// SPDX-License-Identifier: Apache-2.0
// The trial over fake devices: what two verbs ports find out about the paths between them before they use any.
#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <string>
#include <vector>

#include "ports/verbs/verbs_port.hpp"
#include "tests/fake_verbs.hpp"
#include "tests/port_pair.hpp"

using namespace sennit;
using test::FakePacket;
using test::FakeVerbs;
using test::now_us;
using Rank = test::PortRank<VerbsPort>;

namespace {

VerbsConfig config_for(const FakeVerbs& fake, VerbsService service = VerbsService::uc) {
  VerbsConfig config;
  config.addresses = {"fd00::1"};
  config.path_count = 4;
  config.seed = 1;
  config.library = &fake.library();
  config.service = service;
  return config;
}

// Each end tries the other.
struct Tried {
  Rank a, b;
  const std::vector<std::byte> of_a, of_b;
  const std::vector<uint32_t> qpns_of_a;  // where b sends to

  explicit Tried(const VerbsConfig& config)
      : a(0, config),
        b(1, config),
        of_a(test::info_of(a.port, 1)),
        of_b(test::info_of(b.port, 0)),
        qpns_of_a(RoceOffer::decode(of_a).for_reader.qpns) {}
  bool is_for_a(const FakePacket& packet) const {
    return std::find(qpns_of_a.begin(), qpns_of_a.end(), packet.qpn) != qpns_of_a.end();
  }
  void begin() {
    a.port.begin_trial(1, of_b, a);
    b.port.begin_trial(0, of_a, b);
  }
  // True when both have finished.
  bool run(uint64_t limit_us) {
    for (const uint64_t until_us = now_us() + limit_us; now_us() < until_us;) {
      const bool a_is_done = a.port.try_network(now_us()), b_is_done = b.port.try_network(now_us());
      if (a_is_done && b_is_done) return true;
      std::vector<pollfd> readable;
      a.port.append_poll_fds(readable);
      b.port.append_poll_fds(readable);
      poll(readable.data(), readable.size(), 1);
    }
    return false;
  }
  void connect() {
    a.port.connect(1, of_b, a);
    b.port.connect(0, of_a, b);
  }
  void send(uint64_t size_bytes) {
    std::mt19937_64 random(1);
    a.outgoing[5] = test::noise(random, size_bytes);
    b.expect(5, size_bytes, false);
    while (b.received.empty() || a.sent.empty()) {
      a.port.progress(now_us());
      b.port.progress(now_us());
    }
    CHECK(std::equal(a.outgoing[5].begin(), a.outgoing[5].end(), b.incoming[5].begin()));
  }
};

}  // namespace

TEST_CASE("a trial over devices finds every path good, and the flow uses them") {
  FakeVerbs fake;
  Tried pair(config_for(fake));
  pair.begin();
  REQUIRE(pair.run(10'000'000));
  for (auto [rank, peer] : {std::pair{&pair.a, 1u}, std::pair{&pair.b, 0u}}) {
    REQUIRE(rank->port.trial(peer) != nullptr);
    CHECK(rank->port.trial(peer)->is_perfect());
    CHECK(rank->port.trial(peer)->payload_bytes() == 4'096);
    REQUIRE(rank->port.tried_paths(peer).size() == 4);
    for (const TriedPath& path : rank->port.tried_paths(peer)) {
      CHECK(path.device == "fake0");
      CHECK(text_of(path.in_listen) == "[fd00::1]:4791");
      CHECK(path.error == 0);
    }
  }
  pair.connect();
  CHECK(pair.a.port.lane(1).describe().find("4 paths (4 good") != std::string::npos);
  pair.send(1 << 20);
}

TEST_CASE("a black hole between devices is known at both ends, with its direction, and there is no flow") {
  FakeVerbs fake;
  Tried pair(config_for(fake));
  fake.network = [&](const FakePacket& packet) { return pair.is_for_a(packet) ? 0u : 1u; };
  pair.begin();
  REQUIRE(!pair.run(300'000));
  Trial &of_a = *pair.a.port.trial(1), &of_b = *pair.b.port.trial(0);
  const auto from_a = of_a.message(), from_b = of_b.message();
  of_a.on_message(now_us(), from_b);
  of_b.on_message(now_us(), from_a);
  for (const TriedPath& path : pair.a.port.tried_paths(1)) {
    CHECK(path.heard_bytes == 0);
    CHECK(path.told_bytes == 4'096);
  }
  for (const TriedPath& path : pair.b.port.tried_paths(0)) {
    CHECK(path.heard_bytes == 4'096);
    CHECK(path.told_bytes == 0);
  }
  CHECK_THROWS_WITH_AS(pair.a.port.connect(1, pair.of_b, pair.a),
                       "verbs: the trial of the network to rank 1 is not over", std::invalid_argument);
}

TEST_CASE("the packets of devices fall to the size that passes, and one dead path is bad from the start") {
  FakeVerbs fake;
  Tried pair(config_for(fake));
  const uint32_t dead = RoceOffer::decode(pair.of_b).for_reader.qpns[2];
  size_t largest_bytes = 0;
  bool is_tried = false;
  fake.network = [&](const FakePacket& packet) {
    if (is_tried) largest_bytes = std::max(largest_bytes, packet.payload.size());
    return packet.payload.size() > 1'024 || packet.qpn == dead ? 0u : 1u;
  };
  pair.begin();
  REQUIRE(pair.run(10'000'000));
  CHECK(pair.a.port.trial(1)->payload_bytes() == 1'024);
  CHECK(pair.b.port.trial(0)->payload_bytes() == 1'024);
  pair.connect();
  CHECK(pair.a.port.lane(1).describe().find("4 paths (3 good, 0 skip, 1 bad") != std::string::npos);
  is_tried = true;
  pair.send(1 << 20);
  CHECK(largest_bytes == 1'024);
}

TEST_CASE("probes that come after the trial change nothing, nor does noise in their place") {
  FakeVerbs fake;
  Tried pair(config_for(fake));
  std::vector<FakePacket> probes;
  bool is_kept = true;
  fake.network = [&](const FakePacket& packet) {
    if (is_kept) probes.push_back(packet);
    return 1u;
  };
  pair.begin();
  REQUIRE(pair.run(10'000'000));
  is_kept = false;
  REQUIRE(!probes.empty());
  pair.connect();
  for (const FakePacket& probe : probes) fake.arrive(probe);
  FakePacket noise = probes[0];
  noise.payload.assign(4'096, std::byte{0xff});
  fake.arrive(noise);
  noise.payload.assign(3, std::byte{2});
  fake.arrive(noise);
  pair.send(100'000);
  for (const Rank* rank : {&pair.a, &pair.b}) {
    CHECK(rank->counter("bad_slot") == 0);
    CHECK(rank->counter("unknown_qpn") == 0);
    CHECK(rank->lost_reason.empty());
  }
}

TEST_CASE("a port that is down is named as such") {
  FakeVerbs fake;
  Tried pair(config_for(fake));
  pair.begin();
  fake.raise(IBV_EVENT_PORT_ERR);
  REQUIRE(!pair.run(200'000));
  for (const TriedPath& path : pair.a.port.tried_paths(1)) CHECK(path.error == ENETDOWN);
}

TEST_CASE("a device that fails ends the trial with an error") {
  FakeVerbs fake;
  Tried pair(config_for(fake));
  pair.begin();
  fake.raise(IBV_EVENT_DEVICE_FATAL);
  CHECK_THROWS_WITH_AS(pair.run(1'000'000), "verbs: fake0 failed or was removed", std::runtime_error);
}

TEST_CASE("reliable queue pairs are not tried") {
  FakeVerbs fake;
  Tried pair(config_for(fake, VerbsService::rc));
  pair.begin();
  REQUIRE(pair.run(1'000'000));
  CHECK(pair.a.port.trial(1) == nullptr);
  CHECK(pair.a.port.tried_paths(1).empty());
  pair.connect();
  pair.send(100'000);
}
