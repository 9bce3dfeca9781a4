// SPDX-License-Identifier: Apache-2.0
// Where a rank with several peers puts arriving bytes: straight into place, whichever rank sends next.
#include <doctest/doctest.h>

#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "ports/udp/udp_port.hpp"
#include "tests/offers.hpp"

using namespace sennit;

namespace {

uint64_t now_us() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

// Sends its message to every rank that advertises, and has a place for the message of each other rank.
struct Rank final : LaneSink {
  Rank(uint32_t rank, uint32_t size, size_t size_bytes, const PortRange& ports)
      : message(size_bytes, static_cast<std::byte>(rank + 1)),
        places(size, std::vector<std::byte>(size_bytes)),
        port(rank, size, UdpConfig{SendConfig{.seed = 1}, {{"::1", 0}}, ports}) {}

  bool on_eager(uint32_t, const MessageHeader&, uint32_t, const std::byte*) override { return true; }
  void on_advert(uint32_t peer, const MessageHeader&, uint64_t advert_id) override {
    port.lane(peer).transfer(peer, advert_id, message.data(), message.size());
  }
  void on_received(uint64_t, const std::byte*, uint64_t) override { ++received; }
  void on_sent(uint64_t) override { ++sent; }
  void on_peer_lost(uint32_t peer, std::string reason) override { FAIL("rank " << peer << " was lost: " << reason); }

  uint64_t counter(const std::string& name) const {
    for (const auto& [known, value] : port.counters())
      if (known == name) return value;
    FAIL("no counter " << name);
    return 0;
  }

  std::vector<std::byte> message;
  std::vector<std::vector<std::byte>> places;  // by the rank that sends
  size_t received = 0, sent = 0;
  UdpPort port;
};

using Ranks = std::vector<std::unique_ptr<Rank>>;

// The ranks of a process share sockets. Those of other ports do not, as if they were in processes of their own.
Ranks connected_ranks(uint32_t size, size_t size_bytes, bool is_process_each) {
  Ranks ranks;
  for (uint32_t rank = 0; rank < size; ++rank) {
    const auto first = static_cast<uint16_t>(31'000 + 20 * rank);
    const PortRange own{first, static_cast<uint16_t>(first + 19)};
    ranks.push_back(std::make_unique<Rank>(rank, size, size_bytes, is_process_each ? own : PortRange{}));
  }
  for (uint32_t rank = 0; rank < size; ++rank)
    for (uint32_t peer = 0; peer < size; ++peer)
      if (peer != rank) ranks[rank]->port.connect(peer, test::info_of(ranks[peer]->port, rank), *ranks[rank]);
  return ranks;
}

void exchange_all(Ranks& ranks) {
  const auto size = static_cast<uint32_t>(ranks.size());
  for (uint32_t rank = 0; rank < size; ++rank)
    for (uint32_t peer = 0; peer < size; ++peer)
      if (peer != rank)
        ranks[rank]->port.lane(peer).advertise(peer, {1, 7, ranks[peer]->message.size()},
                                               ranks[rank]->places[peer].data());
  const uint64_t deadline_us = now_us() + 30'000'000;
  const auto is_done = [&](const auto& rank) { return rank->received == size - 1 && rank->sent == size - 1; };
  while (!std::all_of(ranks.begin(), ranks.end(), is_done)) {
    for (const auto& rank : ranks) rank->port.progress(now_us());
    REQUIRE(now_us() < deadline_us);
  }
}

// Of this process: UDP sockets with one destination.
size_t connected_sockets() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    int type = 0;
    socklen_t size = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) != 0 || type != SOCK_DGRAM) continue;
    sockaddr_storage peer{};
    size = sizeof peer;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) == 0 && peer.ss_family == AF_INET6) ++count;
  }
  return count;
}

}  // namespace

TEST_CASE("each peer of one host has a socket of its own, which is connected, as far as sockets go") {
  const size_t before = connected_sockets();
  {
    const Ranks ranks = connected_ranks(8, 1, true);
    CHECK(connected_sockets() == before + 8 * 7);
  }
  {
    // Each rank has 16 peers at 8 sockets: one of them has one peer at most, since a rank is no peer of its own.
    const Ranks ranks = connected_ranks(17, 1, true);
    CHECK(connected_sockets() <= before + 17);
  }
  // All send from the same 8 sockets, and each socket has several destinations.
  const Ranks ranks = connected_ranks(8, 1, false);
  CHECK(connected_sockets() == before);
}

TEST_CASE("with several peers data still lands where it belongs, from connected sockets and from others") {
  for (const bool is_connected : {true, false}) {
    CAPTURE(is_connected);
    Ranks ranks = connected_ranks(5, 2 << 20, is_connected);
    exchange_all(ranks);
    for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
      CAPTURE(rank);
      for (uint32_t peer = 0; peer < ranks.size(); ++peer)
        if (peer != rank) CHECK(ranks[rank]->places[peer] == ranks[peer]->message);
      // The batches of four senders alternate. Without looking ahead, one prediction in four would be right.
      CHECK(ranks[rank]->counter("placed_in_place") > 10 * ranks[rank]->counter("placed_by_copy"));
      CHECK(ranks[rank]->counter("receive_peeks") > 0);
      CHECK(ranks[rank]->counter("bad_icrc") == 0);
    }
  }
}
