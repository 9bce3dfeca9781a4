// SPDX-License-Identifier: Apache-2.0
// The trial over real sockets: what two udp ports find out about the paths between them before they use any.
#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "ports/udp/udp_port.hpp"
#include "ports/udp/udp_setup.hpp"
#include "tests/port_pair.hpp"
#include "tests/udp_config.hpp"
#include "wire/endpoint.hpp"

using namespace sennit;

namespace {

using Rank = test::PortRank<UdpPort>;
using test::config_for;
using test::now_us;

// Each end tries the other. `change` may give a false address of an end.
struct Tried {
  Rank a, b;
  std::vector<std::byte> of_a, of_b;

  using Change = std::function<void(uint32_t rank, RoceOffer&)>;

  explicit Tried(const UdpConfig& config, const Change& change = {}) : Tried(config, config, change) {}
  Tried(const UdpConfig& config, const UdpConfig& other, const Change& change = {}) : a(0, config), b(1, other) {
    for (auto [rank, from, info] : {std::tuple{0u, &a, &of_a}, std::tuple{1u, &b, &of_b}}) {
      RoceOffer offer = RoceOffer::decode(test::info_of(from->port, 1 - rank));
      if (change) change(rank, offer);
      *info = offer.encode();
    }
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
};

}  // namespace

TEST_CASE("a trial finds every path good, of which ranks at one address have one, and the flow uses them") {
  using Case = std::tuple<const char*, const char*, uint32_t>;
  for (const auto& [address, other, tried_count] :
       {Case{"::1", "::1", 1}, Case{"127.0.0.1", "127.0.0.1", 1}, Case{"127.0.0.1", "127.0.0.2", 4}}) {
    CAPTURE(address);
    CAPTURE(other);
    Tried pair(config_for(address), config_for(other));
    REQUIRE(pair.run(10'000'000));
    for (auto [rank, peer] : {std::pair{&pair.a, 1u}, std::pair{&pair.b, 0u}}) {
      REQUIRE(rank->port.trial(peer) != nullptr);
      CHECK(rank->port.trial(peer)->is_perfect());
      CHECK(rank->port.trial(peer)->payload_bytes() == 4'096);
      CHECK(rank->port.trial(peer)->path_count() == tried_count);
      REQUIRE(rank->port.tried_paths(peer).size() == tried_count);
      for (const TriedPath& path : rank->port.tried_paths(peer)) {
        CHECK(path.told_bytes == 4'096);
        CHECK(path.heard_bytes == 4'096);
        CHECK(path.error == 0);
      }
      CHECK(rank->counter("bad_icrc") == 0);
    }
    pair.a.port.connect(1, pair.of_b, pair.a);
    pair.b.port.connect(0, pair.of_a, pair.b);
    std::mt19937_64 random(1);
    pair.a.outgoing[5] = test::noise(random, 1 << 20);
    pair.b.expect(5, 1 << 20, false);
    while (pair.b.received.empty() || pair.a.sent.empty()) {
      pair.a.port.progress(now_us());
      pair.b.port.progress(now_us());
    }
    // Not that nothing was sent again: a test that does not run for a while makes its own timers end.
    const std::string count = std::to_string(tried_count);
    CHECK(pair.a.port.lane(1).describe().starts_with(count + (tried_count == 1 ? " path (" : " paths (") + count +
                                                     " good"));
    CHECK(std::equal(pair.a.outgoing[5].begin(), pair.a.outgoing[5].end(), pair.b.incoming[5].begin()));
  }
}

TEST_CASE("a damaged packet is counted before there is a flow, too: one bit leads from a queue pair to another") {
  Tried pair(config_for("::1"));
  const RoceOffer offer = RoceOffer::decode(pair.of_b);
  const UdpSocket stranger(wire::parse_endpoint("::1", 0));
  const SocketAddress to(offer.rails[0].listen);
  // The only path between ranks 0 and 1 of one host is number 0 + 1.
  std::array<std::byte, wire::control_packet_bytes(40)> control{};
  wire::write_control_header(std::span(control).first<wire::CONTROL_HEADER_BYTES>(), offer.for_reader.qpns[1], 1, 40);
  iovec piece{control.data(), control.size()};
  REQUIRE(send_segments(stranger.fd(), &to, std::span(&piece, 1), 0) == 0);
  for (const uint64_t until_us = now_us() + 30'000'000; pair.b.counter("bad_icrc") == 0;) {
    pair.b.port.try_network(now_us());
    REQUIRE(now_us() < until_us);
  }
  CHECK(pair.b.counter("unknown_qpn") == 0);
}

TEST_CASE("both ends find out that one of them hears nothing, and make no flow") {
  // Bound, so that nothing is refused, and never read.
  const UdpSocket hole(wire::parse_endpoint("::1", 0));
  for (const uint32_t deaf : {0u, 1u}) {
    CAPTURE(deaf);
    Tried pair(config_for("::1"), [&](uint32_t rank, RoceOffer& offer) {
      if (rank == deaf) offer.rails[0].listen.port = hole.local().port;
    });
    REQUIRE(!pair.run(300'000));
    Trial &of_a = *pair.a.port.trial(1), &of_b = *pair.b.port.trial(0);
    const auto from_a = of_a.message(), from_b = of_b.message();
    of_a.on_message(now_us(), from_b);
    of_b.on_message(now_us(), from_a);
    for (auto [rank, trial] : {std::pair{0u, &of_a}, std::pair{1u, &of_b}}) {
      CHECK(!trial->is_settled());
      for (uint32_t path = 0; path < trial->path_count(); ++path) {
        // The deaf end was told a wrong port, so its own ICRC would not fit either.
        CHECK(trial->heard_bytes(path) == (rank == deaf ? 0u : 4'096u));
        CHECK(trial->told_bytes(path) == (rank == deaf ? 4'096u : 0u));
      }
    }
    CHECK_THROWS_WITH_AS(pair.a.port.connect(1, pair.of_b, pair.a),
                         "udp: the trial of the network to rank 1 is not over", std::invalid_argument);
  }
}

TEST_CASE("paths that are dead in one direction are bad from the start, for the end that would send over them") {
  const UdpSocket hole(wire::parse_endpoint("127.0.0.1", 0));
  UdpConfig config = config_for("::1");
  UdpConfig other = config;
  config.rails.push_back({"127.0.0.2", 0});
  other.rails.push_back({"127.0.0.1", 0});
  Tried pair(config, other, [&](uint32_t rank, RoceOffer& offer) {
    if (rank == 1) offer.rails[1].listen.port = hole.local().port;
  });
  REQUIRE(pair.run(10'000'000));
  pair.a.port.connect(1, pair.of_b, pair.a);
  pair.b.port.connect(0, pair.of_a, pair.b);
  CHECK(pair.a.port.lane(1).describe().find("8 paths (4 good, 0 skip, 4 bad") != std::string::npos);
  CHECK(pair.b.port.lane(0).describe().find("8 paths (8 good, 0 skip, 0 bad") != std::string::npos);
}

TEST_CASE("a port that is closed is named as refused") {
  uint16_t closed_port = 0;
  {
    const UdpSocket gone(wire::parse_endpoint("::1", 0));
    closed_port = gone.local().port;
  }
  Tried pair(config_for("::1"), [&](uint32_t rank, RoceOffer& offer) {
    if (rank == 1) offer.rails[0].listen.port = closed_port;
  });
  REQUIRE(!pair.run(300'000));
  CHECK(!pair.a.port.tried_paths(1).empty());
  for (const TriedPath& path : pair.a.port.tried_paths(1)) CHECK(path.error == ECONNREFUSED);
  for (const TriedPath& path : pair.b.port.tried_paths(0)) CHECK(path.error == 0);
}

TEST_CASE("smaller packets fill a receive buffer sooner") {
  RoceOffer offer;
  offer.receive_window_bytes = 1'000'000;
  offer.rails.resize(1);
  offer.rails[0].payload_max_bytes = 4'096;
  CHECK(window_at(offer, 4'096) == 1'000'000);
  CHECK(window_at(offer, 1'024) == 500'000);
  offer.rails[0].payload_max_bytes = 1'024;
  CHECK(window_at(offer, 1'024) == 1'000'000);
}

TEST_CASE("all sockets take ports of the range, and ranks of one host share it") {
  for (const char* address : {"::1", "127.0.0.1"}) {
    CAPTURE(address);
    // A listening socket for each of three ranks, and four sending sockets for all that are in this process.
    UdpConfig config = config_for(address);
    config.ports = {30'000, 30'006};
    const Rank a(0, config), b(1, config), c(0, config);
    std::set<uint16_t> used;
    for (const Rank* rank : {&a, &b, &c}) {
      const RoceOffer offer = RoceOffer::decode(test::info_of(rank->port, rank == &b ? 0 : 1));
      used.insert(offer.rails[0].listen.port);
      used.insert(offer.rails[0].entropies.begin(), offer.rails[0].entropies.end());
    }
    CHECK(used.size() == 7);
    CHECK(*used.begin() == 30'000);
    CHECK(*used.rbegin() == 30'006);
    const std::string reason = std::string("all ports of SENNIT_PORTS=30000-30006 are taken at ") + address;
    CHECK_THROWS_WITH_AS(Rank(1, config), doctest::Contains(reason.c_str()), std::system_error);
  }
}

TEST_CASE("a range that has RoCE's port receives there") {
  UdpConfig config = config_for("::1");
  config.ports = {4'780, 4'799};
  const Rank rank(0, config);
  const uint16_t port = RoceOffer::decode(test::info_of(rank.port, 1)).rails[0].listen.port;
  CHECK((port == wire::ROCE_UDP_PORT || port == 4'780));  // unless another process has it
  CHECK(port != 0);
}

TEST_CASE("rails go together by subnet, the rest in order, the same at both ends") {
  const auto offer = [](uint32_t rank, const std::vector<std::pair<std::string, uint8_t>>& rails) {
    RoceOffer out;
    out.rank = rank;
    for (const auto& [address, prefix_bits] : rails) {
      RoceOffer::Rail& rail = out.rails.emplace_back();
      rail.listen = wire::parse_endpoint(address, 4'791);
      rail.prefix_bits = prefix_bits;
      rail.interface = static_cast<uint8_t>(out.rails.size() - 1);
    }
    return out;
  };
  using Pairs = std::vector<std::pair<size_t, size_t>>;
  const auto check = [&](const auto& ours, const auto& theirs, const Pairs& expected) {
    const RoceOffer a = offer(0, ours), b = offer(1, theirs);
    CHECK(pair_rails(a, b).first == expected);
    CHECK(pair_rails(a, b).reserves.empty());
    Pairs swapped;
    for (const auto& [one, other] : expected) swapped.emplace_back(other, one);
    CHECK(pair_rails(b, a).first == swapped);
  };
  using Rails = std::vector<std::pair<std::string, uint8_t>>;
  // The same the other way round, on the other host.
  check(Rails{{"10.0.1.1", 24}, {"10.0.2.1", 24}}, Rails{{"10.0.2.2", 24}, {"10.0.1.2", 24}}, {{0, 1}, {1, 0}});
  // A prefix that is no multiple of eight.
  check(Rails{{"10.0.0.1", 20}, {"10.0.16.1", 20}}, Rails{{"10.0.31.2", 20}, {"10.0.15.2", 20}}, {{0, 1}, {1, 0}});
  // The peer has one rail fewer, and the match is not the first.
  check(Rails{{"10.0.1.1", 24}, {"10.0.2.1", 24}}, Rails{{"10.0.2.2", 24}}, {{1, 0}});
  // No common subnet: routed networks, in order.
  check(Rails{{"10.0.1.1", 24}, {"10.0.2.1", 24}}, Rails{{"10.1.1.2", 24}, {"10.1.2.2", 24}}, {{0, 0}, {1, 1}});
  // One match, and the remaining pair.
  check(Rails{{"10.0.1.1", 24}, {"10.0.2.1", 24}}, Rails{{"10.0.2.2", 24}, {"10.9.9.2", 24}}, {{0, 1}, {1, 0}});
  // Two in one subnet: in order. Unknown or different prefixes: in order.
  check(Rails{{"10.0.1.1", 24}, {"10.0.1.2", 24}}, Rails{{"10.0.1.3", 24}, {"10.0.1.4", 24}}, {{0, 0}, {1, 1}});
  check(Rails{{"10.0.1.1", 0}, {"10.0.2.1", 0}}, Rails{{"10.0.2.2", 0}, {"10.0.1.2", 0}}, {{0, 0}, {1, 1}});
  check(Rails{{"10.0.1.1", 24}, {"10.0.2.1", 16}}, Rails{{"10.0.2.2", 24}, {"10.0.1.2", 23}}, {{0, 0}, {1, 1}});
  // IPv6 first, whatever the order of the interfaces.
  check(Rails{{"10.0.1.1", 24}, {"fd00::1", 64}}, Rails{{"fd00::2", 64}, {"10.0.1.2", 24}}, {{1, 0}, {0, 1}});
  check(Rails{{"10.0.1.1", 24}}, Rails{{"fd00::2", 64}}, {});
}

TEST_CASE("IPv4 pairs of interfaces that have an IPv6 pair are reserves, the same at both ends") {
  using Rails = std::vector<std::pair<std::string, uint8_t>>;  // address, interface
  using Pairs = std::vector<RailPairs::Pair>;
  const auto check = [](const Rails& ours, const Rails& theirs, const Pairs& first, const Pairs& reserves,
                        const std::vector<uint32_t>& reserve_of) {
    RoceOffer a, b;
    b.rank = 1;
    for (auto [offer, rails] : {std::pair(&a, &ours), std::pair(&b, &theirs)})
      for (const auto& [address, interface] : *rails) {
        RoceOffer::Rail& rail = offer->rails.emplace_back();
        rail.listen = wire::parse_endpoint(address, 4'791);
        rail.interface = interface;
        rail.prefix_bits = rail.listen.is_ipv6 ? 64 : 24;
      }
    const RailPairs found = pair_rails(a, b), swapped = pair_rails(b, a);
    CHECK(found.first == first);
    CHECK(found.reserves == reserves);
    CHECK(found.reserve_of == reserve_of);
    const auto turned = [](Pairs pairs) {
      for (auto& [one, other] : pairs) std::swap(one, other);
      return pairs;
    };
    CHECK(swapped.first == turned(first));
    CHECK(swapped.reserves == turned(reserves));
    CHECK(swapped.reserve_of == reserve_of);
  };
  const Rails both{{"fd00::1", 0}, {"10.0.0.1", 0}}, both_there{{"fd00::2", 0}, {"10.0.0.2", 0}};
  check(both, both_there, {{0, 0}}, {{1, 1}}, {0});
  // A peer with one family: that one.
  check(both, {{"10.0.0.2", 0}}, {{1, 0}}, {}, {});
  check(both, {{"fd00::2", 0}}, {{0, 0}}, {}, {});
  // Two interfaces each, crosswise.
  check({{"fd00::1", 0}, {"10.0.0.1", 0}, {"fd00:0:0:1::1", 1}, {"10.0.1.1", 1}},
        {{"fd00:0:0:1::2", 0}, {"10.0.1.2", 0}, {"fd00::2", 1}, {"10.0.0.2", 1}}, {{0, 2}, {2, 0}}, {{1, 3}, {3, 1}},
        {0, 1});
  // One more interface, with IPv4 alone, at both ends.
  check({{"fd00::1", 0}, {"10.0.0.1", 0}, {"10.0.1.1", 1}}, {{"fd00::2", 0}, {"10.0.0.2", 0}, {"10.0.1.2", 1}},
        {{0, 0}, {2, 2}}, {{1, 1}}, {0});
  // The other end has IPv6 and IPv4 on different interfaces: only its IPv4 pair is known to be the same interface here.
  check(both, {{"fd00::2", 0}, {"10.0.0.2", 1}}, {{0, 0}}, {{1, 1}}, {0});
  check({{"fd00::1", 0}, {"10.0.0.1", 1}}, both_there, {{0, 0}}, {{1, 1}}, {0});
}

TEST_CASE("where one family is dead in one direction, the flow uses the other, and the dead one's sockets are closed") {
  const UdpSocket hole(wire::parse_endpoint("::1", 0));
  UdpConfig config = config_for("::1");
  config.rails[0].other_family_address = "127.0.0.1";
  for (const bool is_lost : {false, true}) {
    CAPTURE(is_lost);
    Tried pair(config, [&](uint32_t rank, RoceOffer& offer) {
      REQUIRE(offer.rails.size() == 2);
      if (is_lost && rank == 1) offer.rails[0].listen.port = hole.local().port;
    });
    REQUIRE(pair.run(10'000'000));
    pair.a.port.connect(1, pair.of_b, pair.a);
    pair.b.port.connect(0, pair.of_a, pair.b);
    for (auto [rank, peer] : {std::pair{&pair.a, 1u}, std::pair{&pair.b, 0u}}) {
      for (const TriedPath& path : rank->port.tried_paths(peer))
        CHECK(path.is_used == (path.out_listen.is_ipv6 != is_lost));
      rank->port.close_unused_rails();
      CHECK(rank->port.describe().find(is_lost ? "udp 127.0.0.1:" : "udp [::1]:") == 0);
      CHECK(rank->port.describe().find(is_lost ? "[::1]" : "127.0.0.1") == std::string::npos);
      std::vector<pollfd> readable;
      rank->port.append_poll_fds(readable);
      CHECK(readable.size() == 1);
      CHECK(rank->port.lane(peer).describe().starts_with("1 path (1 good, 0 skip, 0 bad"));
    }
    std::mt19937_64 random(1);
    pair.a.outgoing[5] = test::noise(random, 1 << 20);
    pair.b.expect(5, 1 << 20, false);
    while (pair.b.received.empty() || pair.a.sent.empty()) {
      pair.a.port.progress(now_us());
      pair.b.port.progress(now_us());
    }
    CHECK(std::equal(pair.a.outgoing[5].begin(), pair.a.outgoing[5].end(), pair.b.incoming[5].begin()));
  }
}
