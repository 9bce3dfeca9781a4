// SPDX-License-Identifier: Apache-2.0
// The ports' tracepoints report what happened, as counted independently: by the ports' counters and the fake device.
#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "ports/shm/shm_port.hpp"
#include "ports/udp/udp_port.hpp"
#include "ports/verbs/verbs_port.hpp"
#include "tests/fake_verbs.hpp"
#include "tests/port_pair.hpp"
#include "trace/tracepoints.hpp"

using namespace sennit;
using test::exchange;
using test::FakePacket;
using test::FakeVerbs;
using trace::Memory;
using trace::PortError;
using What = trace::Registration;

namespace {

// Hits of one tracepoint in this thread, which runs both ranks of a pair.
class Recorded {
 public:
  explicit Recorded(std::string_view name) : name_(name) { trace::recorder = &hits_; }
  ~Recorded() { trace::recorder = nullptr; }
  Recorded(const Recorded&) = delete;

  // How many hits have arguments that begin with these.
  template <class... Values>
  size_t count(Values... values) const {
    const std::initializer_list<uint64_t> wanted = {static_cast<uint64_t>(values)...};
    return static_cast<size_t>(std::count_if(hits_.begin(), hits_.end(), [&](const trace::Hit& hit) {
      return hit.name == name_ && std::equal(wanted.begin(), wanted.end(), hit.arguments.begin());
    }));
  }
  // The sum of one argument over these hits.
  uint64_t sum(size_t index) const {
    uint64_t total = 0;
    for (const trace::Hit& hit : hits_)
      if (hit.name == name_) total += hit.arguments[index];
    return total;
  }

 private:
  const std::string_view name_;
  std::vector<trace::Hit> hits_;
};

using VerbsPair = test::PortPair<VerbsPort>;
using UdpPair = test::PortPair<UdpPort>;

VerbsConfig verbs_config(const FakeVerbs& fake) {
  VerbsConfig config;
  config.addresses = {"fd00::1"};
  config.path_count = 4;
  config.seed = 1;
  config.library = &fake.library();
  return config;
}

UdpConfig udp_config() {
  UdpConfig config;
  config.rails = {{"::1", 0}};
  config.path_count = 4;
  config.seed = 1;
  return config;
}

}  // namespace

TEST_CASE("a device's registrations and windows are traced, each with its end") {
  for (const bool has_windows : {true, false}) {
    CAPTURE(has_windows);
    FakeVerbs fake;
    fake.has_windows = has_windows;
    const Recorded recorded("registration");
    {
      VerbsPair pair(verbs_config(fake));
      std::vector<std::byte> buffer(300'000);
      pair.b.port.borrow(buffer.data(), buffer.size());
      for (uint64_t key = 1; key <= 3; ++key) {
        pair.a.outgoing[key] = std::vector<std::byte>(100'000, static_cast<std::byte>(key));
        pair.b.port.lane(0).advertise(key, {key, 7, 100'000}, buffer.data() + (key - 1) * 100'000);
      }
      pair.run_until([&] { return pair.b.received.size() == 3 && pair.a.sent.size() == 3; });
      pair.b.port.give_back(buffer.data(), buffer.size());
      CHECK(recorded.count(1, Memory::region, What::reused) == pair.b.counter("registration_hits"));
      CHECK(recorded.count(1, Memory::region, What::made) ==
            pair.b.counter("registrations") + pair.b.counter("message_registrations"));
      for (const What what : {What::made, What::released})
        CHECK(recorded.count(1, Memory::window, what) == (has_windows ? 3 : 0));
    }
    CHECK(fake.live_registrations == 0);
    for (const uint32_t rank : {0u, 1u}) {
      CHECK(recorded.count(rank, Memory::region, What::made) > 0);
      CHECK(recorded.count(rank, Memory::region, What::made) == recorded.count(rank, Memory::region, What::released));
    }
  }
}

TEST_CASE("a udp port traces the keys that it gives out and takes back") {
  UdpPair pair(udp_config());
  const Recorded recorded("registration");
  exchange(pair, 1, {100'000, 1, 70'000}, false);
  for (const uint32_t rank : {0u, 1u})
    for (const What what : {What::made, What::released}) CHECK(recorded.count(rank, Memory::key, what) == 3);
  CHECK(recorded.sum(5) == 2 * 170'001);
}

TEST_CASE("a shared-memory port traces its segment") {
  const Recorded recorded("registration");
  { ShmPort port(3, 8); }
  CHECK(recorded.count(3, Memory::segment, What::made) == 1);
  CHECK(recorded.count(3, Memory::segment, What::released) == 1);
}

TEST_CASE("a queue pair in error is traced once for each time that it fails") {
  FakeVerbs fake;
  VerbsPair pair(verbs_config(fake));
  exchange(pair, 1, {100'000}, false);
  const Recorded recorded("port_error");
  const RoceOffer offer = RoceOffer::decode(test::info_of(pair.a.port, 1));
  for (const uint32_t qpn : offer.for_reader.qpns) fake.break_queue_pair(qpn);
  exchange(pair, 2, {500'000}, false);
  pair.run_until([&] { return pair.a.counter("path_revivals") == 4; });
  CHECK(recorded.count(0) == pair.a.counter("path_errors"));
  for (const uint32_t path : {0u, 1u, 2u, 3u}) CHECK(recorded.count(0, 1, path) == 1);
}

TEST_CASE("a port that goes down is traced, and that it comes up again is no error") {
  FakeVerbs fake;
  VerbsPair pair(verbs_config(fake));
  const Recorded recorded("port_error");
  fake.raise(IBV_EVENT_PORT_ERR);
  pair.run_until([&] { return pair.a.counter("port_events") == 1; });
  fake.raise(IBV_EVENT_PORT_ACTIVE);
  pair.run_until([&] { return pair.a.counter("port_events") == 2; });
  CHECK(recorded.count(0, trace::NO_PEER, trace::NO_PATH, PortError::port_down, IBV_EVENT_PORT_ERR) == 1);
  CHECK(recorded.count(0) == 1);
}

TEST_CASE("a device that is gone is traced") {
  FakeVerbs fake;
  VerbsPair pair(verbs_config(fake));
  const Recorded recorded("port_error");
  fake.raise(IBV_EVENT_DEVICE_FATAL);
  pair.run_until([&] { return !pair.a.port.failure().empty(); });
  CHECK(recorded.count(0, trace::NO_PEER, trace::NO_PATH, PortError::device, IBV_EVENT_DEVICE_FATAL) == 1);
}

TEST_CASE("a udp peer that is gone is traced with its rank and path") {
  const Recorded recorded("port_error");
  test::PortRank<UdpPort> waiting(0, udp_config());
  waiting.port.connect(1, test::info_of(test::PortRank<UdpPort>(1, udp_config()).port, 0), waiting);
  const uint64_t deadline_us = test::now_us() + 30'000'000;
  while (waiting.lost_reason.empty()) {
    waiting.port.lane(1).expect(test::now_us());
    waiting.port.check_on_peers(test::now_us());
    waiting.port.progress(test::now_us());
    poll(nullptr, 0, 1);
    REQUIRE(test::now_us() < deadline_us);
  }
  size_t on_paths = 0;
  for (const uint32_t path : {0u, 1u, 2u, 3u}) on_paths += recorded.count(0, 1, path, PortError::refused, ECONNREFUSED);
  CHECK(on_paths > 0);
  CHECK(recorded.count() == on_paths);
}

TEST_CASE("packets that the kernel does not take are traced with why") {
  UdpSocket socket(wire::parse_endpoint("127.0.0.1", 0));
  UdpSendCounters counters;
  UdpSender sender(std::make_shared<UdpSendSocket>(std::move(socket)), counters);
  UdpPath path(wire::parse_endpoint("127.0.0.1", 9));
  path.ends = {4, 5};
  path.index = 2;
  path.outgoing = wire::NetworkCrc(sender.local(), path.remote_listen, wire::data_packet_bytes(1'024));
  const Recorded recorded("port_error");
  const std::vector<std::byte> payload(65'536);  // more than a datagram takes
  const flow::DataOut packet{0, 1, 1, payload.data(), static_cast<uint32_t>(payload.size())};
  sender.send_data(path, std::span(&packet, 1));
  CHECK(counters.send_errors == 1);
  CHECK(recorded.count(4, 5, 2, PortError::send, EMSGSIZE) == 1);
}

TEST_CASE("round trips are traced one by one") {
  UdpPair pair(udp_config());
  const Recorded recorded("rtt_sample");
  exchange(pair, 1, {1'000'000}, false);
  CHECK(recorded.count(0, 1) > 0);
  CHECK(recorded.count(1, 0) > 0);
  CHECK(recorded.count() == recorded.count(0, 1) + recorded.count(1, 0));
}
