// SPDX-License-Identifier: Apache-2.0
// The trial of a network between two ends on a virtual clock: what passes, and what both ends then know.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <random>
#include <stdexcept>
#include <vector>

#include "ports/trial.hpp"

using namespace sennit;

namespace {

constexpr uint64_t DELAY_US = 200, LIMIT_US = 2'000'000;

struct Packet {
  uint64_t arrives_us;
  uint32_t path;
  std::vector<std::byte> payload;
};

// Two ends; `passes(from, path, payload_bytes)` is the network between them.
class Pair {
 public:
  using Network = std::function<bool(int from, uint32_t path, uint32_t payload_bytes)>;

  Pair(uint32_t path_count, Network passes, uint32_t payload_max_bytes = 4'096, uint32_t pair_count = 1,
       const std::vector<uint32_t>& reserve_of = {}, uint32_t peer_count = 1)
      : ends{Trial({path_count, payload_max_bytes, true, pair_count, reserve_of, peer_count}),
             Trial({path_count, payload_max_bytes, false, pair_count, reserve_of, peer_count})},
        passes_(std::move(passes)) {}

  // An end that has not begun yet receives nothing, but its socket keeps what arrives.
  void run(uint64_t until_us, uint64_t second_begins_us = 0) {
    for (; now_us < until_us && !(ends[0].is_settled() && ends[1].is_settled() && is_quiet()); now_us += 50) {
      for (int end = 0; end < 2; ++end) {
        if (end == 1 && now_us < second_begins_us) continue;
        std::erase_if(incoming_[end], [&](const Packet& packet) {
          if (packet.arrives_us > now_us) return false;
          ends[end].on_probe(now_us, packet.path, packet.payload);
          return true;
        });
        for (Trial::Probe probe; ends[end].poll(now_us, probe);) {
          ++sent[end];
          if (!passes_(end, probe.path, probe.payload_bytes)) continue;
          std::vector<std::byte> payload = ends[end].message();
          REQUIRE(payload.size() <= probe.payload_bytes);
          payload.resize(probe.payload_bytes);
          incoming_[1 - end].push_back({now_us + DELAY_US, probe.path, std::move(payload)});
        }
        if (ends[end].is_settled() && settled_us[end] == 0) settled_us[end] = now_us;
      }
    }
  }
  // Passes messages as the store does where the network carries nothing.
  void tell_each_other() {
    const auto of_first = ends[0].message(), of_second = ends[1].message();
    ends[0].on_message(now_us, of_second);
    ends[1].on_message(now_us, of_first);
  }

  std::array<Trial, 2> ends;
  std::array<uint32_t, 2> sent{};
  std::array<uint64_t, 2> settled_us{};
  uint64_t now_us = 1;

 private:
  bool is_quiet() const { return incoming_[0].empty() && incoming_[1].empty(); }

  Network passes_;
  std::array<std::vector<Packet>, 2> incoming_;
};

bool everything(int, uint32_t, uint32_t) { return true; }

}  // namespace

TEST_CASE("where everything passes, both ends know after a round trip and a half and few packets") {
  for (const uint32_t path_count : {1u, 7u, 8u, 256u}) {
    CAPTURE(path_count);
    Pair pair(path_count, everything);
    pair.run(LIMIT_US);
    for (int end = 0; end < 2; ++end) {
      CHECK(pair.ends[end].is_perfect());
      CHECK(pair.ends[end].payload_bytes() == 4'096);
      CHECK(pair.settled_us[end] <= 4 * DELAY_US);
      CHECK(pair.sent[end] <= path_count + 8);
    }
  }
}

TEST_CASE("the size falls to what passes in the middle, in either direction, at both ends") {
  for (const uint32_t limit_bytes : {256u, 512u, 1'024u, 2'048u}) {
    for (const int narrow : {0, 1, 2}) {  // one direction, the other, both
      CAPTURE(limit_bytes);
      CAPTURE(narrow);
      Pair pair(8, [&](int from, uint32_t, uint32_t payload_bytes) {
        return (narrow != 2 && from != narrow) || payload_bytes <= limit_bytes;
      });
      pair.run(LIMIT_US);
      for (const Trial& end : pair.ends) {
        REQUIRE(end.is_settled());
        CHECK(end.payload_bytes() == limit_bytes);
        CHECK(!end.is_perfect());
      }
      CHECK(pair.settled_us[1] < 600'000);
    }
  }
}

TEST_CASE("paths that are dead in one direction stay out of use there, and the others keep their size") {
  Pair pair(8, [](int from, uint32_t path, uint32_t) { return from == 0 ? path != 3 : path != 5 && path != 6; });
  pair.run(LIMIT_US);
  for (const Trial& end : pair.ends) {
    REQUIRE(end.is_settled());
    CHECK(end.payload_bytes() == 4'096);
    CHECK(!end.is_perfect());
  }
  for (uint32_t path = 0; path < 8; ++path) {
    CAPTURE(path);
    CHECK((pair.ends[0].told_bytes(path) != 0) == (path != 3));
    CHECK((pair.ends[1].heard_bytes(path) != 0) == (path != 3));
    CHECK((pair.ends[1].told_bytes(path) != 0) == (path != 5 && path != 6));
    CHECK((pair.ends[0].heard_bytes(path) != 0) == (path != 5 && path != 6));
  }
}

TEST_CASE("a one-way black hole never settles, and each end knows its half until it is told the other") {
  for (const int dead : {0, 1}) {
    CAPTURE(dead);
    Pair pair(4, [&](int from, uint32_t, uint32_t) { return from != dead; });
    pair.run(LIMIT_US);
    pair.tell_each_other();
    for (int end = 0; end < 2; ++end) {
      CHECK(!pair.ends[end].is_settled());
      for (uint32_t path = 0; path < 4; ++path) {
        CHECK(pair.ends[end].heard_bytes(path) == (end == dead ? 4'096u : 0u));
        CHECK(pair.ends[end].told_bytes(path) == (end == dead ? 0u : 4'096u));
      }
    }
    // Repetitions in vain must not flood anybody: full and smaller packets, ever more rarely.
    CHECK(pair.sent[0] + pair.sent[1] < 2'000);
  }
}

TEST_CASE("an end that begins a second later finds what its socket kept, and both settle at once") {
  Pair pair(8, everything);
  pair.run(LIMIT_US, 1'000'000);
  for (int end = 0; end < 2; ++end) CHECK(pair.ends[end].is_perfect());
  CHECK(pair.settled_us[1] < 1'000'000 + 6 * DELAY_US);
  CHECK(pair.sent[0] < 500);
}

TEST_CASE("with many peers nothing is repeated while one is busy with others, and the size is found in two seconds") {
  Pair few(8, everything), many(8, everything, 4'096, 1, {}, 63);
  for (Pair* pair : {&few, &many}) pair->run(LIMIT_US, 100'000);
  CHECK(many.ends[0].is_perfect());
  CHECK(many.sent[0] <= 8 + 8);
  CHECK(few.sent[0] > many.sent[0]);
  Pair narrow(
      8, [](int, uint32_t, uint32_t payload_bytes) { return payload_bytes <= 1'024; }, 4'096, 1, {}, 1'023);
  narrow.run(LIMIT_US);
  for (const Trial& end : narrow.ends) CHECK(end.payload_bytes() == 1'024);
}

TEST_CASE("random losses lower nothing, and both ends agree") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    Pair pair(1 + static_cast<uint32_t>(random() % 16), [&](int, uint32_t, uint32_t) { return random() % 10 >= 2; });
    pair.run(LIMIT_US);
    for (const Trial& end : pair.ends) {
      REQUIRE(end.is_settled());
      CHECK(end.payload_bytes() == 4'096);
    }
  }
}

TEST_CASE("whatever passes over each path and direction, ends that settle agree on a size that passes") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    const auto path_count = 1 + static_cast<uint32_t>(random() % 9);
    std::array<std::array<uint32_t, 9>, 2> limit_bytes;
    for (auto& direction : limit_bytes)
      for (uint32_t& limit : direction) limit = random() % 4 == 0 ? 0 : 256u << random() % 5;
    Pair pair(path_count, [&](int from, uint32_t path, uint32_t bytes) { return bytes <= limit_bytes[from][path]; });
    pair.run(LIMIT_US);
    const auto reaches = [&](int from) {
      return std::any_of(limit_bytes[from].begin(), limit_bytes[from].begin() + path_count,
                         [](uint32_t limit) { return limit != 0; });
    };
    for (const Trial& end : pair.ends) REQUIRE(end.is_settled() == (reaches(0) && reaches(1)));
    if (!pair.ends[0].is_settled()) continue;
    const uint32_t agreed_bytes = pair.ends[0].payload_bytes();
    CHECK(pair.ends[1].payload_bytes() == agreed_bytes);
    for (int from = 0; from < 2; ++from)
      for (uint32_t path = 0; path < path_count; ++path)
        CHECK((limit_bytes[from][path] == 0 || limit_bytes[from][path] >= agreed_bytes));
  }
}

TEST_CASE("a verdict that is lost is said again, and can come by the store") {
  int lost = 0;
  Pair pair(
      2, [&](int from, uint32_t, uint32_t payload_bytes) { return from != 0 || payload_bytes != 256 || ++lost > 4; });
  pair.run(LIMIT_US);
  CHECK(lost > 4);
  CHECK(pair.ends[1].is_perfect());

  Pair deaf(2, [](int from, uint32_t, uint32_t payload_bytes) { return from != 0 || payload_bytes != 256; });
  deaf.run(LIMIT_US);
  REQUIRE(deaf.ends[0].is_settled());
  REQUIRE(!deaf.ends[1].is_settled());
  deaf.tell_each_other();
  CHECK(deaf.ends[1].is_perfect());
}

TEST_CASE("malformed messages change nothing") {
  std::mt19937_64 random(7);
  Trial trial({8, 4'096, false});
  const std::vector<std::byte> before = trial.message();
  Trial other({8, 4'096, true});
  const std::vector<std::byte> good = other.message();
  for (int turn = 0; turn < 20'000; ++turn) {
    std::vector<std::byte> bytes(random() % 40);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    if (!bytes.empty() && bytes[0] == good[0]) bytes[0] = std::byte{99};  // another version
    trial.on_message(1, bytes);
    trial.on_probe(1, static_cast<uint32_t>(random() % 300), bytes);  // of no size that is tried
  }
  for (size_t size = 0; size < good.size(); ++size) trial.on_message(1, std::span(good).first(size));
  auto other_paths = good;
  other_paths[3] = std::byte{8};
  trial.on_message(1, other_paths);
  auto too_large = good;
  too_large[2] = std::byte{6};
  trial.on_message(1, too_large);
  CHECK(trial.message() == before);
  CHECK(!trial.is_settled());
  CHECK_THROWS_AS(Trial({0, 4'096, true}), std::invalid_argument);
  CHECK_THROWS_AS(Trial({257, 4'096, true}), std::invalid_argument);
  CHECK_THROWS_AS(Trial({8, 1'000, true}), std::invalid_argument);
}

TEST_CASE("a reserve is used only where its pair does not pass both ways, and both ends know") {
  // Two interfaces: pairs 0 and 1 are IPv6, 2 and 3 their reserves. Each pair has two of eight paths.
  struct Case {
    std::vector<std::pair<int, uint32_t>> lost;  // from which end, over which pair
    std::vector<bool> is_used;
  };
  const std::vector<Case> cases{
      {{}, {true, true, false, false}},
      {{{0, 2}, {1, 3}}, {true, true, false, false}},          // only reserves: nobody minds
      {{{0, 0}}, {false, true, true, false}},                  // one way, on the first interface
      {{{1, 1}}, {true, false, false, true}},                  // the other way, on the second
      {{{0, 0}, {1, 1}}, {false, false, true, true}},          // both
      {{{0, 0}, {1, 2}}, {true, true, true, false}},           // each family carries one direction
      {{{0, 0}, {0, 2}, {1, 2}}, {true, true, false, false}},  // a reserve that carries nothing does not help
  };
  for (const Case& one : cases) {
    const auto case_number = &one - cases.data();
    CAPTURE(case_number);
    const auto passes = [&](int from, uint32_t path, uint32_t) {
      return std::find(one.lost.begin(), one.lost.end(), std::pair(from, path % 4)) == one.lost.end();
    };
    Pair pair(8, passes, 4'096, 4, {0, 1});
    pair.run(LIMIT_US);
    for (int end = 0; end < 2; ++end) {
      const Trial& trial = pair.ends[end];
      REQUIRE(trial.is_settled());
      CHECK(trial.payload_bytes() == 4'096);
      CHECK(trial.is_perfect() == (case_number < 2));
      for (uint32_t path = 0; path < 8; ++path) CHECK(trial.is_used(path) == one.is_used[path % 4]);
      // Where all is well, reserves cost no packet.
      if (case_number < 2) CHECK(pair.sent[end] <= 4 + 8);
    }
  }
}

TEST_CASE("paths that are left out do not set the size") {
  Pair pair(4, [](int from, uint32_t path, uint32_t size) { return path % 2 == 1 || (from == 0 && size <= 256); },
            4'096, 2, {0});
  pair.run(LIMIT_US);
  for (const Trial& end : pair.ends) CHECK(end.payload_bytes() == 4'096);
}

TEST_CASE("a verdict that leaves out every path is ignored, and a reserve must stand in for another pair") {
  Trial trial({4, 4'096, false, 2, {0}});
  Trial other({4, 4'096, true, 2, {0}});
  std::vector<std::byte> message = other.message();
  message[2] = std::byte{5};
  for (size_t byte = 4; byte < message.size(); ++byte) message[byte] = std::byte{0xdd};  // level 5, left out
  trial.on_message(1, message);
  CHECK(!trial.is_settled());
  CHECK_THROWS_AS(Trial({4, 4'096, true, 1, {0}}), std::invalid_argument);
  CHECK_THROWS_AS(Trial({4, 4'096, true, 2, {1}}), std::invalid_argument);
  CHECK_THROWS_AS(Trial({4, 4'096, true, 0, {}}), std::invalid_argument);
}
