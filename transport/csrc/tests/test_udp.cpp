// SPDX-License-Identifier: Apache-2.0
// Two udp ports in one process over the loopback device: bytes, losses, strangers' packets, wrong set-up.
#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "flow/congestion.hpp"
#include "flow/control.hpp"
#include "flow/path_policy.hpp"
#include "ports/udp/udp_port.hpp"
#include "tests/port_pair.hpp"
#include "tests/udp_config.hpp"

using namespace sennit;

namespace {

using Rank = test::PortRank<UdpPort>;
using Pair = test::PortPair<UdpPort>;
using test::config_for;
using test::exchange;
using test::noise;
using test::now_us;

}  // namespace

TEST_CASE("messages of all sizes arrive unchanged both ways") {
  for (const char* address : {"::1", "127.0.0.1"}) {
    CAPTURE(address);
    Pair pair(config_for(address));
    exchange(pair, 1, {0, 1, 2, 3, 4, 5, 100, 4'095, 4'096, 4'097, 8'192, 61'440, 61'441, 1'000'003}, false);
    exchange(pair, 2, {0, 1, 4'096, 65'537, 131'072, 131'072, 131'071, 3}, true);
    exchange(pair, 3, {24 << 20, 5, 8 << 20}, false);
    for (const Rank* rank : {&pair.a, &pair.b}) {
      CHECK(rank->counter("bad_icrc") == 0);
      CHECK(rank->counter("send_errors") == 0);
      CHECK(rank->counter("placed_in_place") > 10 * rank->counter("placed_by_copy"));
    }
  }
}

TEST_CASE("ranks of one host wait for no grants: no link is shared between them") {
  Pair pair(config_for("::1"));
  exchange(pair, 4, {24 << 20}, false);
  CHECK(pair.a.counter("credit_stalls") == 0);
  CHECK(pair.b.counter("credit_stalls") == 0);
}

TEST_CASE("a round visits the peers that have work, however many others are connected") {
  constexpr uint32_t IDLE_COUNT = 256, ROUNDS_PER_CALL = 4;
  Pair pair(
      config_for("::1", 1), [](RoceOffer&) {}, 2 + IDLE_COUNT);
  RoceOffer silent = RoceOffer::decode(test::info_of(pair.b.port, 0));
  for (uint32_t peer = 2; peer < 2 + IDLE_COUNT; ++peer) {
    silent.rank = peer;
    pair.a.port.connect(peer, silent.encode(), pair.a);
  }
  pair.a.port.progress(now_us());  // every new peer is visited once
  const auto visits = [&] { return pair.a.port.agenda().visits(); };
  const uint64_t at_begin = visits();
  for (int round = 0; round < 1'000; ++round) pair.a.port.progress(now_us());
  CHECK(visits() == at_begin);
  CHECK(pair.a.port.next_timeout_us() == UINT64_MAX);

  const uint64_t calls_at_begin = pair.progress_calls;
  exchange(pair, 9, {1, 4'097, 1'000'003, 8 << 20}, false);
  CHECK(visits() > at_begin);
  CHECK(visits() - at_begin <= ROUNDS_PER_CALL * (pair.progress_calls - calls_at_begin));

  // Somebody waits for one silent peer: it alone is asked for a sign of life, at times of its own.
  const uint64_t before_question = visits(), begin_us = now_us();
  uint64_t wakes = 0;
  for (uint64_t at_us = begin_us; at_us < begin_us + 2'000'000; at_us += 1'000) {
    if ((at_us - begin_us) % 50'000 == 0) pair.a.port.lane(7).expect(at_us), ++wakes;
    pair.a.port.progress(at_us);
  }
  CHECK(visits() > before_question);
  CHECK(visits() - before_question <= ROUNDS_PER_CALL * wakes);
}

TEST_CASE("every path policy and congestion control carries the same bytes, and says what it is") {
  for (const std::string_view policy : flow::path_policies()) {
    for (const std::string_view congestion : flow::congestion_controls()) {
      CAPTURE(policy);
      CAPTURE(congestion);
      UdpConfig config = config_for("127.0.0.1", 3), other = config_for("127.0.0.2", 3);
      for (UdpConfig* one : {&config, &other}) {
        one->path_policy = policy;
        one->congestion = congestion;
        one->window_bytes = 256 << 10;
      }
      Pair pair(config, other);
      exchange(pair, 8, {3 << 20, 77, 123'457}, false);
      CHECK(pair.a.port.lane(1).describe().starts_with("3 paths ("));
      const std::string expected = std::string("3 paths a rail (")
                                       .append(policy)
                                       .append("), window 262144 bytes (")
                                       .append(congestion)
                                       .append(")");
      CHECK(pair.a.port.describe().find(expected) != std::string::npos);
      CHECK(pair.a.counter("window_packets") <= 64);
      CHECK(pair.a.counter("window_packets") >= 2);
    }
  }
}

TEST_CASE("unknown names and windows out of range are refused before a socket is open") {
  UdpConfig config = config_for("::1");
  config.path_policy = "random";
  CHECK_THROWS_WITH_AS(UdpPort(0, 2, config), "path_policy \"random\"; allowed: round_robin, reps",
                       std::invalid_argument);
  config = config_for("::1");
  config.congestion = "cubic";
  CHECK_THROWS_WITH_AS(UdpPort(0, 2, config), "congestion \"cubic\"; allowed: dctcp, fixed, swift",
                       std::invalid_argument);
  for (const uint32_t window_bytes : {0u, 65'535u, (64u << 20) + 1}) {
    config = config_for("::1");
    config.window_bytes = window_bytes;
    CHECK_THROWS_AS(UdpPort(0, 2, config), std::invalid_argument);
  }
}

TEST_CASE("two rails of two families carry one flow") {
  UdpConfig config = config_for("::1", 3);
  config.rails.push_back({"127.0.0.1", 0});
  Pair pair(config);
  exchange(pair, 4, {10 << 20, 77, 123'457}, false);
  CHECK(pair.a.counter("bad_icrc") == 0);
}

TEST_CASE("packets between ranks of one host are larger, where the window holds enough of them") {
  struct Case {
    const char* other;
    uint32_t window_bytes, payload_bytes;
  };
  for (const Case& one :
       {Case{"127.0.0.1", 2 << 20, 20'480}, Case{"127.0.0.1", 256 << 10, 4'096}, Case{"127.0.0.2", 2 << 20, 4'096}}) {
    CAPTURE(one.other);
    CAPTURE(one.window_bytes);
    UdpConfig config = config_for("127.0.0.1", 1), other = config_for(one.other, 1);
    other.window_bytes = one.window_bytes;  // one end's setting holds for both
    Pair pair(config, other);
    constexpr uint64_t SIZE_BYTES = 6'144'000;
    exchange(pair, 5, {SIZE_BYTES}, false);
    for (const Rank* rank : {&pair.a, &pair.b}) {
      CHECK(rank->counter("data_packets_received") == SIZE_BYTES / one.payload_bytes);
      CHECK(rank->counter("bad_icrc") == 0);
    }
    // Small messages are eager up to the same size everywhere.
    CHECK(pair.a.port.lane(1).eager_max_bytes() == 4'096 - flow::EAGER_HEADER_BYTES);
  }
}

TEST_CASE("a packet above 4,096 bytes is refused on a path that leaves the host") {
  for (const auto& [other_address, counter] :
       {std::pair{"127.0.0.2", "oversized"}, std::pair{"127.0.0.1", "bad_range"}}) {
    CAPTURE(other_address);
    Pair pair(config_for("127.0.0.1", 1), config_for(other_address, 1));
    const RoceOffer offer = RoceOffer::decode(test::info_of(pair.b.port, 0));
    std::vector<std::byte> bytes(wire::data_packet_bytes(8'192));
    wire::write_data_header(std::span(bytes).first<wire::DATA_HEADER_BYTES>(), offer.for_reader.qpns[0], 0,
                            offer.eager_address(0), offer.for_reader.eager_rkey, 0, 8'192);
    const UdpSocket stranger(wire::parse_endpoint("127.0.0.1", 0));
    const SocketAddress to(offer.rails[0].listen);
    iovec piece{bytes.data(), bytes.size()};
    REQUIRE(send_segments(stranger.fd(), &to, std::span(&piece, 1), 0) == 0);
    pair.run_until([&] { return pair.b.counter(counter) == 1; });
  }
}

TEST_CASE("a control goes with data between two ranks of one host") {
  Pair pair(config_for("::1"));
  exchange(pair, 6, std::vector<uint64_t>(8, 8 << 20), false);
  for (const Rank* rank : {&pair.a, &pair.b})
    CHECK(rank->counter("send_calls") < rank->counter("data_packets_sent") + rank->counter("control_packets_sent"));
}

TEST_CASE("a pair of rails has one path where both are one address, unless another pair leaves it") {
  UdpConfig config = config_for("::1", 3);
  config.rails.push_back({"127.0.0.1", 0});
  UdpConfig other = config;
  const auto paths = [&] { return Pair(config, other).a.port.lane(1).describe(); };
  CHECK(paths().starts_with("2 paths ("));
  other.rails[1].address = "127.0.0.2";
  CHECK(paths().starts_with("6 paths ("));
  config.rails.resize(1);
  other.rails.resize(1);
  CHECK(paths().starts_with("1 path ("));
}

TEST_CASE("eager messages keep their order, also when the receiver has no room at first") {
  Pair pair(config_for("::1"));
  std::mt19937_64 random(5);
  Lane& lane = pair.a.port.lane(1);
  std::vector<std::vector<std::byte>> messages;
  for (int i = 0; i < 500; ++i) messages.push_back(noise(random, random() % (lane.eager_max_bytes() + 1)));
  pair.b.refusals_left = 20;
  size_t next = 0;
  pair.run_until([&] {
    while (next < messages.size() &&
           lane.send_eager({next, 9, messages[next].size()}, EAGER_DATA, messages[next].data()))
      ++next;
    return pair.b.eager_received.size() == messages.size() && pair.a.port.idle();
  });
  for (size_t i = 0; i < messages.size(); ++i) {
    REQUIRE(pair.b.eager_received[i].first == i);
    REQUIRE(pair.b.eager_received[i].second == messages[i]);
  }
}

TEST_CASE("what overflows a small socket buffer is sent again") {
  UdpConfig config = config_for("::1");
  config.receive_buffer_bytes = 96 << 10;
  Pair pair(config, [](RoceOffer& offer) { offer.receive_window_bytes = 2 << 20; });  // a lie
  exchange(pair, 6, {6 << 20, 1'000, 3 << 20}, false);
  CHECK(pair.a.counter("retransmitted_packets") + pair.b.counter("retransmitted_packets") > 0);
}

TEST_CASE("a stranger's packets change counters and nothing else") {
  for (const char* address : {"::1", "127.0.0.1"}) {
    CAPTURE(address);
    Pair pair(config_for(address));
    const RoceOffer offer = RoceOffer::decode(test::info_of(pair.b.port, 0));
    const wire::Endpoint target = offer.rails[0].listen;
    UdpSocket stranger(wire::parse_endpoint(address, 0));
    const SocketAddress to(target);
    std::mt19937_64 random(7);
    const auto send = [&](std::vector<std::byte> bytes) {
      iovec piece{bytes.data(), bytes.size()};
      REQUIRE(send_segments(stranger.fd(), &to, std::span(&piece, 1), 0) == 0);
    };
    // A forger who knows the queue pair and the eager key, but cannot send from the peer's address.
    const auto forge = [&](uint32_t qpn, uint32_t rkey, uint64_t remote_address, uint32_t immediate,
                           size_t size_bytes) {
      std::vector<std::byte> bytes(wire::data_packet_bytes(size_bytes));
      wire::write_data_header(std::span<std::byte, wire::DATA_HEADER_BYTES>(bytes.data(), wire::DATA_HEADER_BYTES), qpn,
                              0, remote_address, rkey, immediate, static_cast<uint32_t>(size_bytes));
      const wire::NetworkCrc network(stranger.local(), target, 0);
      uint32_t crc =
          wire::extend_with_header(network.of(bytes.size(), 0), std::span(bytes).first(wire::DATA_HEADER_BYTES));
      crc = wire::extend(crc, std::span(bytes).subspan(wire::DATA_HEADER_BYTES, size_bytes));
      std::array<std::byte, 7> trailer;
      const size_t trailer_bytes = wire::write_trailer(trailer, crc, wire::pad_of(size_bytes));
      std::copy_n(trailer.begin(), trailer_bytes,
                  bytes.begin() + static_cast<std::ptrdiff_t>(wire::DATA_HEADER_BYTES + size_bytes));
      return bytes;
    };
    // The only path between ranks 0 and 1 of one host is number 0 + 1.
    const uint32_t qpn = offer.for_reader.qpns[1], eager_rkey = offer.for_reader.eager_rkey;
    const uint64_t eager_address = offer.eager_address(0);
    std::vector<std::byte> tiny(3), junk = noise(random, 2'000);
    const auto flood = [&] {
      send(tiny);
      send(junk);
      for (int i = 0; i < 20; ++i) send(noise(random, 1 + random() % 5'000));
      send(forge(qpn ^ (1 << 23), eager_rkey, eager_address, 0, 64));  // the next numbers are those of other paths
      send(forge(qpn, eager_rkey ^ 1, eager_address, 0, 64));
      send(forge(qpn, eager_rkey, eager_address + (1 << 30), 0, 64));
      send(forge(qpn, eager_rkey, eager_address, 0, 64));
      auto control = std::vector<std::byte>(wire::control_packet_bytes(40));
      wire::write_control_header(std::span<std::byte, 12>(control.data(), 12), qpn, 1, 40);
      send(control);
      auto versioned = forge(qpn, eager_rkey, eager_address, 0, 64);
      versioned[1] |= std::byte{1};
      send(versioned);
    };
    // Before, during and after real messages.
    flood();
    for (int round = 0; round < 5; ++round) {
      exchange(pair, 9 + static_cast<uint64_t>(round), {300'000, 17, 2 << 20}, false);
      flood();
    }
    pair.run_until([&] {
      const std::array<std::string, 5> named = {"bad_version", "unknown_qpn", "bad_key", "bad_range", "bad_icrc"};
      return std::all_of(named.begin(), named.end(), [&](const auto& name) { return pair.b.counter(name) >= 6; });
    });
    CHECK(pair.b.counter("truncated") >= 6);
    CHECK(pair.b.counter("bad_opcode") > 0);
    CHECK(pair.b.lost_reason == "");
    CHECK(pair.b.eager_received.empty());
  }
}

TEST_CASE("a queue pair that was offered to a rank of another port is as unknown as any other") {
  UdpPort port(0, 3, config_for("::1"));
  const UdpSocket stranger(wire::parse_endpoint("::1", 0));
  const SocketAddress to(RoceOffer::decode(test::info_of(port, 1)).rails[0].listen);
  const auto send = [&](std::span<std::byte> bytes) {
    iovec piece{bytes.data(), bytes.size()};
    REQUIRE(send_segments(stranger.fd(), &to, std::span(&piece, 1), 0) == 0);
  };
  for (const uint32_t peer : {1u, 2u}) {
    const RoceOffer offer = RoceOffer::decode(test::info_of(port, peer));
    const uint32_t qpn = offer.for_reader.qpns[0];
    std::array<std::byte, wire::control_packet_bytes(40)> control{};
    wire::write_control_header(std::span(control).first<wire::CONTROL_HEADER_BYTES>(), qpn, 1, 40);
    send(control);
    std::array<std::byte, wire::data_packet_bytes(64)> data{};
    wire::write_data_header(std::span(data).first<wire::DATA_HEADER_BYTES>(), qpn, 1, offer.eager_address(peer),
                            offer.for_reader.eager_rkey, 0, 64);
    send(data);
  }
  const auto unknown = [&] {
    for (const auto& [name, value] : port.counters())
      if (name == "unknown_qpn") return value;
    return uint64_t{0};
  };
  const uint64_t deadline_us = now_us() + 30'000'000;
  while (unknown() != 4) {
    port.progress(now_us());
    std::vector<pollfd> readable;
    port.append_poll_fds(readable);
    poll(readable.data(), readable.size(), 1);
    REQUIRE(now_us() < deadline_us);
  }
}

TEST_CASE("goodbye and abort reach the peer") {
  Pair pair(config_for("::1"));
  pair.b.expect(1, 1'000, false);
  pair.run_until([&] { return !pair.b.port.progress(now_us()); });
  pair.a.port.abort("rank 0 was stopped");
  pair.run_until([&] { return !pair.b.lost_reason.empty(); });
  CHECK(pair.b.lost_reason.find("rank 0 was stopped") != std::string::npos);
}

TEST_CASE("a peer whose process ended is noticed by the one that waits for it") {
  for (const char* address : {"::1", "127.0.0.1"}) {
    CAPTURE(address);
    const UdpConfig config = config_for(address);
    Rank waiting(0, config);
    waiting.port.connect(1, test::info_of(Rank(1, config).port, 0), waiting);  // gone at once, its sockets with it
    const uint64_t deadline_us = now_us() + 30'000'000;
    while (waiting.lost_reason.empty()) {
      waiting.port.lane(1).expect(now_us());
      waiting.port.check_on_peers(now_us());
      waiting.port.progress(now_us());
      poll(nullptr, 0, 1);
      REQUIRE(now_us() < deadline_us);
    }
    CHECK(waiting.lost_reason.find("nobody listens at") != std::string::npos);
    CHECK(waiting.lost_reason.find(address) != std::string::npos);
  }
}

TEST_CASE("what a peer sent before its process ended is read before the peer is taken for gone") {
  constexpr size_t MESSAGE_COUNT = 60;  // more batches than one call of progress() reads
  Rank reading(0, config_for("::1"));
  auto leaving = std::make_unique<Rank>(1, config_for("::1"));
  reading.port.connect(1, test::info_of(leaving->port, 0), reading);
  leaving->port.connect(0, test::info_of(reading.port, 1), *leaving);
  const std::vector<std::byte> word(8);
  for (uint64_t key = 0; key < MESSAGE_COUNT; ++key)
    REQUIRE(leaving->port.lane(0).send_eager({key, 9, word.size()}, EAGER_DATA, word.data()));
  while (leaving->port.progress(now_us())) {
  }
  leaving->port.close();
  leaving.reset();

  // Its sockets are closed, so this is refused.
  REQUIRE(reading.port.lane(1).send_eager({0, 9, word.size()}, EAGER_DATA, word.data()));
  const uint64_t deadline_us = now_us() + 30'000'000;
  while (reading.lost_reason.empty()) {
    reading.port.lane(1).expect(now_us());
    reading.port.check_on_peers(now_us());
    reading.port.progress(now_us());
    REQUIRE(now_us() < deadline_us);
  }
  CHECK(reading.eager_received.size() == MESSAGE_COUNT);
}

TEST_CASE("a peer that does not run is noticed by the one that waits for it, one that runs is not taken for dead") {
  for (const char* address : {"::1", "127.0.0.1"}) {
    UdpConfig config = config_for(address);
    config.peer_timeout_us = 1'000'000;
    Pair pair(config);
    test::check_that_silence_is_noticed(pair, config.peer_timeout_us);
  }
}

TEST_CASE("set-up mistakes are named") {
  const auto open = [](const std::string& address, uint16_t port, uint32_t paths = 4) {
    UdpConfig config;
    config.rails = {{address, port}};
    config.path_count = paths;
    return UdpPort(0, 2, config);
  };
  CHECK_THROWS_WITH_AS(open("not an address", 0), doctest::Contains("not an address"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(open("203.0.113.77", 0), doctest::Contains("not an address of this machine"), std::system_error);
  CHECK_THROWS_WITH_AS(open("::1", 0, 257), doctest::Contains("1 to 256"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(UdpPort(0, 2, UdpConfig{}), doctest::Contains("no rail"), std::invalid_argument);
  const UdpSocket taken(wire::parse_endpoint("::1", 0));
  CHECK_THROWS_WITH_AS(open("::1", taken.local().port), doctest::Contains("taken by another process"),
                       std::system_error);
}

TEST_CASE("an offer names queue pairs that do not follow one another, and none of more than 24 bits") {
  const UdpPort port(0, 2, config_for("::1"));
  RoceOffer offer = RoceOffer::decode(test::info_of(port, 1));
  std::vector<uint32_t>& qpns = offer.for_reader.qpns;
  REQUIRE(qpns.size() == 4);
  const size_t run_bytes = offer.encode().size();
  std::swap(qpns[1], qpns[2]);
  CHECK(offer.encode().size() == run_bytes + 3 * sizeof(uint32_t));
  CHECK(RoceOffer::decode(offer.encode()).for_reader.qpns == qpns);
  for (const uint32_t first : {wire::QPN_MASK - 2, wire::QPN_MASK + 1}) {
    std::iota(qpns.begin(), qpns.end(), first);
    CHECK_THROWS_WITH_AS(RoceOffer::decode(offer.encode()), doctest::Contains("24 bits are allowed"),
                         std::invalid_argument);
  }
}

TEST_CASE("an offer that does not fit is refused with both sides") {
  Rank a(0, config_for("::1")), b(1, config_for("127.0.0.1"));
  auto info = test::info_of(b.port, 0);
  CHECK_THROWS_WITH_AS(a.port.connect(1, info, a), doctest::Contains("one family"), std::invalid_argument);
  for (size_t size_bytes = 0; size_bytes < info.size(); ++size_bytes)
    CHECK_THROWS_AS(a.port.connect(1, std::span(info).first(size_bytes), a), std::invalid_argument);
  auto other_version = info, other_wire = info;
  other_version[4] = std::byte{9};
  CHECK_THROWS_WITH_AS(a.port.connect(1, other_version, a), doctest::Contains("version 9, this rank has version 7"),
                       std::invalid_argument);
  other_wire[8] = std::byte{1};
  const std::string both = "wire revision 1, this rank has wire revision " + std::to_string(flow::CONTROL_VERSION);
  CHECK_THROWS_WITH_AS(a.port.connect(1, other_wire, a), doctest::Contains(both.c_str()), std::invalid_argument);
  CHECK_THROWS_WITH_AS(a.port.connect(1, test::info_of(a.port, 1), a), doctest::Contains("rank 0 of 2"),
                       std::invalid_argument);
}
