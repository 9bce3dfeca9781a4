// SPDX-License-Identifier: Apache-2.0
// Two verbs ports over fake devices: bytes under loss, copies that come late, keys, errors of the device.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "flow/immediate.hpp"
#include "ports/udp/udp_port.hpp"
#include "ports/verbs/verbs_port.hpp"
#include "tests/fake_verbs.hpp"
#include "tests/port_pair.hpp"

using namespace sennit;
using test::exchange;
using test::FakePacket;
using test::FakeVerbs;
using test::noise;
using Pair = test::PortPair<VerbsPort>;

namespace {

VerbsConfig config_for(const FakeVerbs& fake, uint32_t path_count = 4) {
  VerbsConfig config;
  config.addresses = {"fd00::1"};
  config.path_count = path_count;
  config.seed = 1;
  config.library = &fake.library();
  return config;
}

bool is_data(const FakePacket& packet) { return packet.opcode == IBV_WR_RDMA_WRITE_WITH_IMM; }

const std::vector<uint64_t> SIZES = {0, 1, 3, 4'095, 4'096, 4'097, 61'441, 1'000'003};
const std::vector<uint64_t> LOAN_SIZES = {0, 1, 4'096, 65'537, 131'072, 131'072, 131'071, 3};

}  // namespace

TEST_CASE("messages of all sizes arrive unchanged both ways") {
  for (const bool has_windows : {true, false}) {
    FakeVerbs fake;
    fake.has_windows = has_windows;
    Pair pair(config_for(fake));
    exchange(pair, 1, SIZES, false);
    exchange(pair, 2, LOAN_SIZES, true);
    for (const auto* rank : {&pair.a, &pair.b}) {
      CHECK(rank->counter("send_dropped") == 0);
      CHECK((rank->counter("memory_binds") != 0) == has_windows);
      CHECK((rank->counter("message_registrations") != 0) != has_windows);
    }
  }
}

TEST_CASE("what is lost, doubled or overtaken changes no byte") {
  FakeVerbs fake;
  Pair pair(config_for(fake));
  std::mt19937_64 random(7);
  std::vector<FakePacket> delayed;
  fake.network = [&](const FakePacket& packet) -> uint32_t {
    if (delayed.size() > 50) {
      for (const FakePacket& late : delayed) fake.arrive(late);
      delayed.clear();
    }
    switch (random() % 40) {
      case 0:
        return 0;
      case 1:
        return 2;
      case 2:
        delayed.push_back(packet);
        return 0;
      case 3:
        delayed.push_back(packet);
        return 1;
      default:
        return 1;
    }
  };
  for (uint64_t turn = 1; turn <= 5; ++turn) exchange(pair, turn, SIZES, false);
  exchange(pair, 6, LOAN_SIZES, true);
  CHECK(pair.a.counter("retransmitted_packets") > 0);
  CHECK(pair.a.counter("duplicate_packets") > 0);
}

TEST_CASE("a copy that comes after its message was handed over reaches no memory") {
  for (const bool has_windows : {true, false}) {
    CAPTURE(has_windows);
    FakeVerbs fake;
    fake.has_windows = has_windows;
    Pair pair(config_for(fake));
    std::vector<FakePacket> copies;
    fake.network = [&](const FakePacket& packet) {
      if (is_data(packet)) copies.push_back(packet);
      return 1u;
    };
    exchange(pair, 1, {100'000}, false);
    REQUIRE(copies.size() >= 2 * 25);  // more if this process paused: then it asks again
    auto& memory = pair.b.incoming.at(1 << 20);
    std::fill(memory.begin(), memory.end(), std::byte{0x11});
    const uint64_t refused_before = fake.refused_keys;
    const size_t late = copies.size();
    for (const FakePacket& copy : copies) fake.arrive(copy);
    CHECK(fake.refused_keys - refused_before == late);
    exchange(pair, 2, {10}, false);  // and the ports go on
    CHECK(std::all_of(memory.begin(), memory.end(), [](std::byte byte) { return byte == std::byte{0x11}; }));
    CHECK(pair.a.counter("remote_access_errors") + pair.b.counter("remote_access_errors") == fake.refused_keys);
  }
}

TEST_CASE("a copy of an eager packet that comes after its slot was used again changes nothing") {
  FakeVerbs fake;
  Pair pair(config_for(fake));
  std::vector<FakePacket> copies;
  fake.network = [&](const FakePacket& packet) {
    CHECK(packet.opcode != IBV_WR_RDMA_WRITE_WITH_IMM);
    if (packet.opcode == IBV_WR_SEND_WITH_IMM) copies.push_back(packet);
    // Each packet is followed by a copy of a packet that is a whole ring older.
    if (packet.opcode == IBV_WR_SEND_WITH_IMM && copies.size() > EAGER_SLOT_COUNT) {
      fake.arrive(packet);
      fake.arrive(copies[copies.size() - 1 - EAGER_SLOT_COUNT]);
      return 0u;
    }
    return 1u;
  };
  std::mt19937_64 random(5);
  std::vector<std::vector<std::byte>> messages;
  for (int i = 0; i < 300; ++i) messages.push_back(noise(random, 1 + random() % 4'000));
  size_t next = 0;
  pair.run_until([&] {
    Lane& lane = pair.a.port.lane(1);
    while (next < messages.size() &&
           lane.send_eager({next, 9, messages[next].size()}, EAGER_DATA, messages[next].data()))
      ++next;
    return pair.b.eager_received.size() == messages.size() && pair.a.port.idle();
  });
  for (size_t i = 0; i < messages.size(); ++i) REQUIRE(pair.b.eager_received[i].second == messages[i]);
  CHECK(pair.b.counter("duplicate_packets") > 0);
}

TEST_CASE("a message is handed over only when the device has taken its key back") {
  FakeVerbs fake;
  Pair pair(config_for(fake));
  std::mt19937_64 random(3);
  pair.a.outgoing[1] = noise(random, 50'000);
  fake.binds_are_slow = true;
  pair.b.expect(1, 50'000, false);
  for (int round = 0; round < 50; ++round) {
    pair.a.port.progress(test::now_us());
    pair.b.port.progress(test::now_us());
  }
  CHECK(pair.a.counter("data_packets_sent") == 0);  // not told of it yet
  fake.finish_binds();
  pair.run_until([&] { return pair.b.counter("data_packets_received") == 13 && pair.a.sent.size() == 1; });
  for (int round = 0; round < 50; ++round) pair.b.port.progress(test::now_us());
  CHECK(pair.b.received.empty());
  fake.finish_binds();
  pair.run_until([&] { return pair.b.received.size() == 1; });
}

TEST_CASE("no key comes back within the life of a packet, while the device has windows") {
  for (const uint32_t window_max_count : {UINT32_MAX, 20u}) {
    CAPTURE(window_max_count);
    FakeVerbs fake;
    fake.window_max_count = window_max_count;
    Pair pair(config_for(fake));
    for (uint64_t turn = 1; turn <= 150; ++turn) exchange(pair, turn, std::vector<uint64_t>(10, 5'000), false);
    CHECK(fake.bound_keys.size() == 2 * 1'500);
    const bool is_scarce = window_max_count != UINT32_MAX;
    const std::set<uint32_t> keys(fake.bound_keys.begin(), fake.bound_keys.end());
    CHECK((keys.size() == fake.bound_keys.size()) != is_scarce);
    CHECK((pair.a.counter("keys_reused_early") + pair.b.counter("keys_reused_early") == 0) != is_scarce);
  }
}

TEST_CASE("borrowed memory is registered once and let go when it is given back") {
  FakeVerbs fake;
  Pair pair(config_for(fake));
  const uint32_t own = fake.live_registrations;
  std::vector<std::byte> buffer(300'000);
  pair.b.port.borrow(buffer.data(), buffer.size());
  for (uint64_t key = 1; key <= 3; ++key) {
    pair.a.outgoing[key] = std::vector<std::byte>(100'000, static_cast<std::byte>(key));
    pair.b.port.lane(0).advertise(key, {key, 7, 100'000}, buffer.data() + (key - 1) * 100'000);
  }
  pair.run_until([&] { return pair.b.received.size() == 3 && pair.a.sent.size() == 3; });
  CHECK(buffer[0] == std::byte{1});
  CHECK(buffer[299'999] == std::byte{3});
  CHECK(fake.live_registrations == own + 1);
  CHECK(pair.b.counter("registration_hits") == 2);
  pair.b.port.give_back(buffer.data(), buffer.size());
  CHECK(fake.live_registrations == own);
}

TEST_CASE("memory that is vouched for stays registered, and gives way where the limit is reached") {
  for (const bool has_windows : {true, false}) {
    CAPTURE(has_windows);
    FakeVerbs fake;
    fake.has_windows = has_windows;
    Pair pair(config_for(fake));
    constexpr size_t SIZE_BYTES = 100'000;
    std::vector<std::byte> first(SIZE_BYTES), second(SIZE_BYTES), third(SIZE_BYTES);
    uint64_t key = 0;
    // An operation of the sender. Its buffer is borrowed meanwhile, and either guaranteed beyond that or not.
    const auto send = [&](std::vector<std::byte>& buffer) {
      pair.a.port.borrow(buffer.data(), buffer.size());
      pair.a.outgoing[++key] = buffer;
      std::swap(pair.a.outgoing[key], buffer);  // the rank sends from the buffer itself
      pair.b.expect(key, SIZE_BYTES, false);
      pair.run_until([&] { return pair.b.received.contains(key) && pair.a.sent.contains(key); });
      std::swap(pair.a.outgoing[key], buffer);
      pair.a.port.give_back(buffer.data(), buffer.size());
    };
    const auto made = [&] { return pair.a.counter("registrations"); };
    const uint64_t own = made();
    send(first);
    send(first);
    CHECK(made() == own + 2);
    for (auto* buffer : {&first, &second}) pair.a.port.borrow(buffer->data(), buffer->size());
    send(first);
    send(second);
    send(first);
    CHECK(made() == own + 4);
    // No room for a third beside them. The second was used less recently. (The receiver uses its own part.)
    const uint64_t receiver_bytes = SIZE_BYTES + 1;
    fake.locked_max_bytes = fake.locked_bytes + receiver_bytes;
    send(third);
    CHECK(pair.a.counter("registrations_evicted") == 1);
    CHECK(pair.a.port.failure().empty());
    CHECK(pair.b.port.failure().empty());
    send(first);
    CHECK(made() == own + 5);
    send(second);
    CHECK(made() == own + 6);
    for (auto* buffer : {&first, &second}) pair.a.port.give_back(buffer->data(), buffer->size());
    CHECK(pair.a.counter("registered_bytes") == pair.b.counter("registered_bytes"));
  }
}

TEST_CASE("memory that cannot be registered ends the port and says what to do") {
  FakeVerbs fake;
  Pair pair(config_for(fake));
  fake.registration_max_bytes = 100'000;
  CHECK(pair.b.port.failure().empty());
  pair.b.expect(1, 200'000, false);
  CHECK(pair.b.port.failure().find("cannot register 200001 bytes") == std::string::npos);
  CHECK(pair.b.port.failure().find("cannot register 200000 bytes") != std::string::npos);
  CHECK(pair.b.port.failure().find("fake0") != std::string::npos);
}

TEST_CASE("a rank of a large group makes fewer paths to each peer") {
  CHECK(VerbsPort::path_count(7, 8) == 8);
  CHECK(VerbsPort::path_count(1'023, 8) == 4);
  CHECK(VerbsPort::path_count(2 * VerbsPort::QUEUE_PAIR_GOOD_COUNT, 8) == 1);
  FakeVerbs fake;
  const VerbsPort port(0, 1'500, config_for(fake));
  CHECK(port.describe().find("2 paths a rail") != std::string::npos);
}

TEST_CASE("a queue pair in error is brought up again under its number") {
  FakeVerbs fake;
  Pair pair(config_for(fake));
  exchange(pair, 1, {100'000}, false);
  const std::vector<uint32_t> before = fake.queue_pairs();
  fake.can_connect = false;
  // Queue pairs of the first rank's paths. The first one that sends is its binder.
  const RoceOffer offer = RoceOffer::decode(test::info_of(pair.a.port, 1));
  for (const uint32_t qpn : offer.for_reader.qpns) fake.break_queue_pair(qpn);
  std::mt19937_64 random(3);
  for (auto* rank : {&pair.a, &pair.b}) rank->outgoing[77] = noise(random, 500'000);
  for (auto* rank : {&pair.a, &pair.b}) rank->expect(77, 500'000, false);
  pair.run_until([&] { return pair.a.counter("path_errors") == 4; });
  fake.can_connect = true;
  pair.run_until([&] { return pair.a.received.contains(77) && pair.b.received.contains(77); });
  pair.run_until([&] { return pair.a.counter("path_revivals") == 4; });
  CHECK(std::equal(pair.a.outgoing[77].begin(), pair.a.outgoing[77].end(), pair.b.incoming[77].begin()));
  CHECK(fake.queue_pairs() == before);
  CHECK(pair.a.port.failure().empty());
}

TEST_CASE("a port that goes down fails its paths, one that comes up has them tried again") {
  FakeVerbs fake;
  Pair pair(config_for(fake));
  exchange(pair, 1, {100'000}, false);
  fake.network = [](const FakePacket&) { return 0u; };
  fake.raise(IBV_EVENT_PORT_ERR);
  pair.run_until([&] { return pair.a.counter("path_state_changes") >= 4; });
  fake.network = [](const FakePacket&) { return 1u; };
  fake.raise(IBV_EVENT_PORT_ACTIVE);
  exchange(pair, 2, {100'000}, false);
  pair.run_until([&] { return pair.a.counter("port_events") == 2; });
}

TEST_CASE("several devices carry the parts of one message, each with its own key") {
  for (const bool has_windows : {true, false}) {
    CAPTURE(has_windows);
    FakeVerbs fake;
    fake.has_windows = has_windows;
    fake.addresses = {"fd00::1", "fd00::2"};  // two rails of one device, with one of another in between
    fake.second_addresses = {"fd00:1::1"};
    VerbsConfig config = config_for(fake);
    config.addresses = {"fd00::1", "fd00:1::1", "fd00::2"};
    Pair pair(config);
    exchange(pair, 1, SIZES, false);
    exchange(pair, 2, LOAN_SIZES, true);
    CHECK(fake.arrived[0] > 100);
    CHECK(fake.arrived[1] > 100);
    CHECK(fake.refused_keys == 0);
    // Lost packets go again over any path, with that path's key.
    std::mt19937_64 random(9);
    std::vector<FakePacket> copies;
    fake.network = [&](const FakePacket& packet) {
      if (is_data(packet)) copies.push_back(packet);
      return random() % 20 == 0 ? 0u : 1u;
    };
    for (uint64_t turn = 3; turn <= 6; ++turn) exchange(pair, turn, SIZES, false);
    CHECK(pair.a.counter("retransmitted_packets") > 0);
    fake.network = [](const FakePacket&) { return 1u; };
    CHECK(fake.refused_keys == pair.a.counter("remote_access_errors") + pair.b.counter("remote_access_errors"));
    // A message that was handed over is closed on all devices.
    const auto before = pair.b.incoming;
    for (const FakePacket& copy : copies) fake.arrive(copy);
    CHECK(pair.b.incoming == before);
  }
}

TEST_CASE("a device whose port goes down fails its own paths and not those of other devices") {
  for (const bool is_stuck : {false, true}) {
    CAPTURE(is_stuck);
    FakeVerbs fake;
    fake.second_addresses = {"fd00:1::1"};
    VerbsConfig config = config_for(fake);
    config.addresses = {"fd00::1", "fd00:1::1"};
    Pair pair(config);
    exchange(pair, 1, {1'000'000}, false);
    // In the middle of a message: what should leave through that port never does.
    fake.is_stuck = is_stuck;
    fake.network = [](const FakePacket& packet) { return packet.device == 1 ? 0u : 1u; };
    const uint64_t sent = pair.a.counter("data_packets_sent"), before = fake.arrived[0];
    std::mt19937_64 random(4);
    for (auto* rank : {&pair.a, &pair.b}) rank->outgoing[7] = noise(random, 1'000'000);
    for (auto* rank : {&pair.a, &pair.b}) rank->expect(7, 1'000'000, false);
    pair.run_until([&] { return pair.a.counter("data_packets_sent") > sent + 100; });
    fake.raise(IBV_EVENT_PORT_ERR, 1);
    pair.run_until([&] { return pair.a.counter("port_events") == 1 && pair.b.counter("port_events") == 1; });
    pair.run_until([&] { return pair.a.sent.contains(7) && pair.b.sent.contains(7); });
    exchange(pair, 2, {3'000'000}, false);
    CHECK(fake.arrived[0] > before + 1'000);
    for (const std::string& paths : {pair.a.port.lane(1).describe(), pair.b.port.lane(0).describe()})
      CHECK_MESSAGE(paths.starts_with("8 paths (4 good, 0 skip, "), paths);
    CHECK(pair.a.port.failure().empty());
    fake.is_stuck = false;
    fake.network = [](const FakePacket&) { return 1u; };
    fake.raise(IBV_EVENT_PORT_ACTIVE, 1);
    const uint64_t second = fake.arrived[1];
    for (uint64_t turn = 3; fake.arrived[1] < second + 100; ++turn) exchange(pair, turn, {1'000'000}, false);
  }
}

TEST_CASE("a device that fails ends the port and names itself") {
  FakeVerbs fake;
  Pair pair(config_for(fake));
  fake.raise(IBV_EVENT_DEVICE_FATAL);
  pair.run_until([&] { return !pair.a.port.failure().empty(); });
  CHECK(pair.a.port.failure() == "verbs: fake0 failed or was removed");
}

TEST_CASE("an abort takes all keys back before it returns") {
  for (const bool are_binds_slow : {false, true}) {
    CAPTURE(are_binds_slow);
    FakeVerbs fake;
    Pair pair(config_for(fake));
    std::vector<FakePacket> copies;
    fake.network = [&](const FakePacket& packet) {
      if (is_data(packet)) copies.push_back(packet);
      return is_data(packet) && copies.size() > 3 ? 0u : 1u;
    };
    std::mt19937_64 random(3);
    pair.a.outgoing[1] = noise(random, 200'000);
    pair.b.expect(1, 200'000, false);
    pair.run_until([&] { return copies.size() > 10; });
    fake.binds_are_slow = are_binds_slow;  // a device that does not answer any more
    pair.b.port.abort("enough");
    pair.b.port.revoke();
    auto& memory = pair.b.incoming.at(1);
    std::fill(memory.begin(), memory.end(), std::byte{0x11});
    for (const FakePacket& copy : copies) fake.arrive(copy);
    CHECK(std::all_of(memory.begin(), memory.end(), [](std::byte byte) { return byte == std::byte{0x11}; }));
    CHECK(pair.b.received.empty());
    if (!are_binds_slow) pair.run_until([&] { return pair.a.lost_reason == "aborted: enough"; });
  }
}

TEST_CASE("set-up mistakes are named") {
  const auto refused = [](const std::string& text, const VerbsConfig& config) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS(VerbsPort(0, 2, config), doctest::Contains(text.c_str()), std::exception);
  };
  {
    FakeVerbs fake;
    fake.has_device = false;
    refused("there is no RDMA device (see `rdma link`", config_for(fake));
  }
  {
    FakeVerbs fake;
    fake.addresses = {"192.0.2.9"};
    refused("no RDMA device has a RoCE v2 GID for fd00::1; there are: fake0 port 1 GID 0 192.0.2.9:4791 4096 bytes",
            config_for(fake));
  }
  {
    FakeVerbs fake;
    fake.addresses.clear();
    refused("there are: fake0 port 1 without a RoCE v2 GID (give its interface an address)", config_for(fake));
  }
  {
    FakeVerbs fake;
    fake.port_state = IBV_PORT_DOWN;
    refused("the port is down", config_for(fake));
  }
  {
    FakeVerbs fake;
    fake.mtu = IBV_MTU_512;
    refused("512 bytes a packet; at least 1024 are needed", config_for(fake));
  }
  {
    FakeVerbs fake;
    fake.partitions = {0x8001, 0};
    refused("fake0 port 1 GID 0 [fd00::1]:4791 4096 bytes is not in the default partition, 0xffff", config_for(fake));
  }
  {
    FakeVerbs fake;
    fake.can_be_opened = false;
    refused("fake0 cannot be opened: Permission denied", config_for(fake));
  }
  {
    FakeVerbs fake;
    fake.has_unreliable_service = false;
    refused("SENNIT_VERBS_SERVICE=rc", config_for(fake));
    VerbsConfig config = config_for(fake);
    config.service = VerbsService::rc;
    Pair pair(config);
    exchange(pair, 1, {100'000}, false);
  }
  {
    FakeVerbs fake;
    VerbsConfig config = config_for(fake);
    config.addresses.clear();
    refused("no rail given", config);
    refused("257 paths over 1 rails", config_for(fake, 257));
    config.addresses = {"fd00::1", "fd00:1::1"};
    refused("no RDMA device has a RoCE v2 GID for fd00:1::1", config);
  }
}

TEST_CASE("a socket and a device agree only where they can understand each other") {
  FakeVerbs fake;
  const VerbsPort port(0, 2, config_for(fake));
  const RoceOffer device = RoceOffer::decode(test::info_of(port, 1));
  const auto agree_with = [&](const std::string& address, uint16_t listen_port, bool is_reliable) {
    RoceOffer socket = device;
    socket.rank = 1;
    socket.is_device = false;
    socket.is_reliable = is_reliable;
    socket.rails[0].listen = wire::parse_endpoint(address, listen_port);
    RoceOffer ours = device;
    if (address.find(':') == std::string::npos) ours.rails[0].listen = wire::parse_endpoint("192.0.2.1", 4'791);
    return agree(ours, 1, socket, SendConfig{}, [](const auto&, const auto&) { return 4'096u; });
  };
  CHECK(agree_with("fd00::2", 4'791, false).flow.payload_max_bytes == 4'096);
  // A device may send to its own host over a switch, so all paths count there too.
  const wire::Endpoint here = device.rails[0].listen;
  CHECK(agree_with(address_text(here), 4'791, false).path_count == device.path_count);
  CHECK_THROWS_WITH_AS(agree_with("192.0.2.2", 4'791, false), doctest::Contains("IPv6 is needed"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(agree_with("fd00::2", 5'000, false), doctest::Contains("rank 1 listens at [fd00::2]:5000"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(agree_with("fd00::2", 4'791, true), doctest::Contains("SENNIT_VERBS_SERVICE"),
                       std::invalid_argument);
}

TEST_CASE("a source port is what a device makes of its flow label") {
  for (uint32_t port = 0xC000; port <= 0xFFFF; ++port) {
    const uint32_t label = flow_label_for(static_cast<uint16_t>(port));
    REQUIRE(label != 0);
    REQUIRE(ibv_flow_label_to_udp_sport(label) == port);
  }
}

TEST_CASE("a peer that does not run is noticed by the one that waits for it, one that runs is not taken for dead") {
  FakeVerbs fake;
  VerbsConfig config = config_for(fake);
  config.peer_timeout_us = 1'000'000;
  Pair pair(config);
  test::check_that_silence_is_noticed(pair, config.peer_timeout_us);
}
