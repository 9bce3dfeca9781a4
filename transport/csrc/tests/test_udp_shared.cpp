// SPDX-License-Identifier: Apache-2.0
// Groups of one process over udp: they send from the same sockets, and one does not suffer from another.
#include <dirent.h>
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "executor/engine.hpp"
#include "ports/udp/udp_port.hpp"
#include "tests/in_child.hpp"
#include "tests/port_pair.hpp"
#include "tests/udp_config.hpp"

using namespace sennit;

namespace {

// The descriptor on which sends find the device's queue full.
std::atomic<int> full_fd{-1};

}  // namespace

extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  if (fd != full_fd.load()) return syscall(SYS_sendmsg, fd, message, flags);
  errno = EAGAIN;
  return -1;
}

extern "C" int sendmmsg(int fd, mmsghdr* messages, unsigned count, int flags) {
  if (fd != full_fd.load()) return static_cast<int>(syscall(SYS_sendmmsg, fd, messages, count, flags));
  errno = EAGAIN;
  return -1;
}

namespace {

using Rank = test::PortRank<UdpPort>;
using Pair = test::PortPair<UdpPort>;
using test::config_for;
using test::now_us;

size_t open_descriptors() {
  size_t count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

// A destination, what sends there in one group, and what has arrived.
struct Way {
  Way(std::shared_ptr<UdpSendSocket> socket, const char* address)
      : listener(std::make_unique<UdpSocket>(wire::parse_endpoint(address, 0))),
        path(listener->local()),
        sender(std::move(socket), counters) {
    path.remote_qpn = 5;
    path.outgoing = wire::NetworkCrc(sender.local(), listener->local(), wire::data_packet_bytes(64));
    sender.add_destination(path.remote_listen);
  }
  void send() {
    const std::array<std::byte, 64> payload{};
    sender.send_control(path, payload);
  }
  size_t arrived() const {
    std::array<std::byte, 2'048> buffer;
    for (size_t count = 0;; ++count) {
      iovec place{buffer.data(), buffer.size()};
      if (receive_segments(listener->fd(), std::span(&place, 1)).error != 0) return count;
    }
  }

  std::unique_ptr<UdpSocket> listener;
  UdpPath path;
  UdpSendCounters counters;
  UdpSender sender;
};

std::shared_ptr<UdpSendSocket> open_socket(const char* address) {
  return of_process<UdpSendSockets>()->open(address, {}, 0);
}

// What a disconnect must not change.
std::array<int, 4> options_of(const UdpSocket& socket) {
  const bool is_ipv6 = socket.local().is_ipv6;
  const int level = is_ipv6 ? IPPROTO_IPV6 : IPPROTO_IP;
  std::array<int, 4> values{};
  socklen_t size = sizeof(int);
  REQUIRE(getsockopt(socket.fd(), level, is_ipv6 ? IPV6_RECVERR : IP_RECVERR, &values[0], &size) == 0);
  REQUIRE(getsockopt(socket.fd(), level, is_ipv6 ? IPV6_TCLASS : IP_TOS, &values[1], &size) == 0);
  REQUIRE(getsockopt(socket.fd(), SOL_SOCKET, SO_SNDBUF, &values[2], &size) == 0);
  REQUIRE(getsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &values[3], &size) == 0);
  CHECK(values[0] == 1);
  CHECK(values[1] == 2);  // ECT(0)
  CHECK(values[3] == 0);
  return values;
}

}  // namespace

TEST_CASE("groups share a socket for each address, range and path, as long as one of them lives") {
  const auto sockets = of_process<UdpSendSockets>();
  const auto one = sockets->open("::1", {}, 0);
  CHECK(sockets->open("::1", {}, 0) == one);
  CHECK(sockets->open("::1", {}, 1) != one);
  CHECK(sockets->open("127.0.0.1", {}, 0) != one);
  const PortRange range{30'100, 30'200};
  const auto limited = sockets->open("::1", range, 0);
  CHECK(limited->socket().local().port >= range.first);
  CHECK(limited->socket().local().port <= range.last);
  CHECK(sockets->open("::1", range, 0) == limited);
  test::check_in_child([&](const test::Child& child) {
    const auto own = of_process<UdpSendSockets>();
    CHILD_REQUIRE(child, own != sockets);
    CHILD_REQUIRE(child, own->open("::1", {}, 0)->socket().local().port != one->socket().local().port);
  });
}

TEST_CASE("a socket is connected while it has one destination, and sends to all of them in either state") {
  for (const char* address : {"::1", "127.0.0.1"}) {
    CAPTURE(address);
    const auto socket = open_socket(address);
    CHECK_FALSE(socket->is_connected());
    const auto port = socket->socket().local().port;
    const auto options = options_of(socket->socket());
    Way first(socket, address);
    first.sender.add_destination(first.path.remote_listen);
    CHECK(socket->is_connected());
    first.send();
    {
      Way second(socket, address);
      CHECK_FALSE(socket->is_connected());
      for (Way* way : {&second, &first}) way->send();
      CHECK(second.arrived() == 1);
      CHECK(second.counters.send_errors == 0);
    }
    CHECK(socket->is_connected());
    first.send();
    CHECK(first.arrived() == 3);
    CHECK(first.counters.send_errors == 0);
    // It is bound as before, has its options, and shares its port with nobody.
    CHECK(options_of(socket->socket()) == options);
    CHECK_THROWS_AS(UdpSocket(wire::parse_endpoint(address, port)), std::system_error);
    sockaddr_storage bound{};
    socklen_t size = sizeof bound;
    REQUIRE(getsockname(socket->socket().fd(), reinterpret_cast<sockaddr*>(&bound), &size) == 0);
    CHECK(ntohs(reinterpret_cast<sockaddr_in*>(&bound)->sin_port) == port);
  }
}

TEST_CASE("a group hears what came back from its own destinations, and loses no packet over another's") {
  for (const char* address : {"::1", "127.0.0.1"}) {
    CAPTURE(address);
    const auto socket = open_socket(address);
    Way gone(socket, address), other(socket, address), same(socket, address);
    same.path = gone.path;  // of a third group with a rank in the process that is gone
    same.sender.add_destination(same.path.remote_listen);
    gone.listener.reset();
    for (size_t round = 1; round <= 3; ++round) {
      // The kernel answers with the report at once, and the next send on the socket fails with it.
      gone.send();
      other.send();
      CHECK(other.arrived() == 1);
      CHECK(other.counters.send_errors == 0);
      CHECK_FALSE(other.sender.look_for_refusals());
      REQUIRE(gone.sender.has_refused());
      REQUIRE(same.sender.has_refused());
      for (Way* way : {&gone, &same}) {
        const std::vector<RefusedPacket> refused = way->sender.take_refused();
        REQUIRE(refused.size() == 1);
        CHECK(refused[0].destination == gone.path.remote_listen);
        CHECK(refused[0].qpn == 5);
        CHECK_FALSE(way->sender.has_refused());
      }
    }
    // Nobody asks: what waits has an end.
    for (size_t i = 0; i < UdpSendSocket::Reports::REFUSED_MAX_COUNT + 10; ++i) {
      gone.send();
      gone.sender.look_for_refusals();
    }
    CHECK(gone.sender.take_refused().size() == UdpSendSocket::Reports::REFUSED_MAX_COUNT);
  }
}

TEST_CASE("a full queue holds up each group's batch by itself, and loses none") {
  const auto socket = open_socket("::1");
  Way a(socket, "::1"), b(socket, "::1");
  full_fd = socket->socket().fd();
  a.send();
  b.send();
  for (Way* way : {&a, &b}) {
    CHECK(way->sender.is_blocked());
    CHECK(way->counters.send_blocked == 1);
    CHECK_FALSE(way->sender.flush(1'000));
    CHECK(way->arrived() == 0);
  }
  full_fd = -1;
  REQUIRE(b.sender.flush(2'000));
  CHECK(b.arrived() == 1);
  CHECK(a.arrived() == 0);
  CHECK(a.sender.is_blocked());
  REQUIRE(a.sender.flush(2'000));
  CHECK(a.arrived() == 1);
  for (const Way* way : {&a, &b}) CHECK(way->counters.send_errors == 0);
}

TEST_CASE("a peer's process dies: the groups with it name it, and a group of other ranks goes on") {
  for (const char* address : {"::1", "127.0.0.1"}) {
    CAPTURE(address);
    const UdpConfig config = config_for(address);
    std::array<std::unique_ptr<Rank>, 2> dying, waiting;
    for (size_t group = 0; group < 2; ++group) {
      dying[group] = std::make_unique<Rank>(1, config);
      waiting[group] = std::make_unique<Rank>(0, config);
      waiting[group]->port.connect(1, test::info_of(dying[group]->port, 0), *waiting[group]);
    }
    Pair living(config);
    test::exchange(living, 1, {10'000, 1 << 20}, false);
    for (auto& rank : dying) rank.reset();
    const uint64_t deadline_us = now_us() + 30'000'000;
    for (uint64_t seed = 2; waiting[0]->lost_reason.empty() || waiting[1]->lost_reason.empty(); ++seed) {
      for (auto& rank : waiting) {
        rank->port.lane(1).expect(now_us());
        rank->port.check_on_peers(now_us());
        rank->port.progress(now_us());
      }
      test::exchange(living, seed, {10'000, 65'536}, false);
      REQUIRE(now_us() < deadline_us);
    }
    for (auto& rank : waiting) CHECK(rank->lost_reason.find("nobody listens at") != std::string::npos);
    for (const Rank* rank : {&living.a, &living.b}) {
      CHECK(rank->lost_reason.empty());
      CHECK(rank->counter("send_errors") == 0);
    }
    test::exchange(living, 1'000'000, {8 << 20}, false);
  }
}

TEST_CASE("threads drive groups over the same sockets, while others come and go") {
  const UdpConfig config = config_for("::1", 2);
  std::atomic<uint32_t> busy{2};
  std::vector<std::thread> threads;
  for (uint32_t group = 0; group < 2; ++group)
    threads.emplace_back([&config, &busy, group] {
      Pair pair(config);
      for (uint64_t round = 1; round <= 20; ++round) test::exchange(pair, 100 * group + round, {5, 70'000}, round % 2);
      for (const Rank* rank : {&pair.a, &pair.b}) CHECK(rank->counter("bad_icrc") == 0);
      --busy;
    });
  threads.emplace_back([&config, &busy] {
    while (busy != 0) {
      auto gone = std::make_unique<Rank>(1, config);
      Rank waiting(0, config);
      waiting.port.connect(1, test::info_of(gone->port, 0), waiting);
      gone.reset();
      const std::byte word{1};
      CHECK(waiting.port.lane(1).send_eager({0, 9, 1}, EAGER_DATA, &word));
      for (int round = 0; round < 20; ++round) waiting.port.progress(now_us());
    }
  });
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("a group costs one descriptor, its listening socket") {
  constexpr size_t GROUP_COUNT = 50;
  const size_t before = open_descriptors();
  std::vector<Engine*> groups;
  for (size_t group = 0; group < GROUP_COUNT; ++group) {
    groups.push_back(new Engine({0, 2, 10'000'000, group, 1}));
    groups.back()->ports().udp_open(config_for("::1", 8));
  }
  CHECK(open_descriptors() - before <= GROUP_COUNT + 10);
  for (Engine* group : groups) group->release();
  CHECK(open_descriptors() <= before + 2);
}
