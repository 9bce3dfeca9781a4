// SPDX-License-Identifier: Apache-2.0
// Ranks and an aggregator over a simulated network: sums are right or missing, and nobody waits for ever.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "aggregation/client.hpp"
#include "aggregation/store.hpp"

using namespace sennit;
using namespace sennit::aggregation;

namespace {

constexpr uint64_t KEY = 77;

struct Weather {
  double loss = 0, repetition = 0;
  uint64_t delay_us = 100, jitter_us = 0;
};

// A rank that sums vectors one after another, or some at once.
struct Rank {
  explicit Rank(uint16_t leaf, uint16_t leaves, uint16_t window)
      : client(std::make_unique<Client>(ClientConfig{.key = KEY, .leaf = leaf, .leaves = leaves, .window = window},
                                        counters)) {}
  ClientCounters counters;
  std::unique_ptr<Client> client;
  struct Vector {
    uint64_t message = 0, operation = 0;
    std::vector<uint32_t> leaf, sum;
    bool has_ended = false;
    uint64_t missing = 0;
  };
  std::deque<Vector> vectors;
  uint64_t stands_until_us = 0;
};

class Network {
 public:
  Network(uint16_t ranks, uint16_t window, const Weather& weather, uint64_t seed)
      : weather_(weather), random_(seed), memory_(Store::MEMORY_MIN_BYTES / 64), store_(bytes()) {
    for (uint16_t leaf = 0; leaf < ranks; ++leaf) this->ranks.emplace_back(leaf, ranks, window);
  }

  // Each rank's part of an operation, of small integers, whose sum no order changes.
  void post(size_t rank, uint64_t operation, size_t elements) {
    Rank& one = ranks[rank];
    one.vectors.push_back({.operation = operation, .leaf = std::vector<uint32_t>(elements), .sum = {}});
    Rank::Vector& vector = one.vectors.back();
    vector.sum.resize(elements);
    for (size_t at = 0; at < elements; ++at) vector.leaf[at] = value(rank, operation, at);
    vector.message =
        one.client->foresee(operation, elements * 4, AGGREGATION_SUM_I32, static_cast<uint32_t>(operation));
    one.client->set_source(vector.message, reinterpret_cast<const std::byte*>(vector.leaf.data()));
    one.client->set_destination(vector.message, reinterpret_cast<std::byte*>(vector.sum.data()));
  }

  // Until all vectors have ended. False: not within `limit_us`.
  bool run(uint64_t limit_us) {
    const uint64_t until_us = now_us + limit_us;
    while (now_us < until_us) {
      for (size_t rank = 0; rank < ranks.size(); ++rank) step(rank);
      while (!on_the_way_.empty() && on_the_way_.begin()->first <= now_us) {
        const Packet packet = std::move(on_the_way_.begin()->second);
        on_the_way_.erase(on_the_way_.begin());
        arrive(packet);
      }
      tell();
      if (std::ranges::all_of(ranks, [](const Rank& rank) {
            return rank.client->is_joined() && std::ranges::all_of(rank.vectors, &Rank::Vector::has_ended);
          }))
        return true;
      now_us += 20;
    }
    return false;
  }

  // Every sum that is not missing is right. Returns how many operations lack something.
  size_t check() {
    size_t lacking = 0;
    for (const Rank& rank : ranks) {
      for (const Rank::Vector& vector : rank.vectors) {
        REQUIRE(vector.has_ended);
        if (vector.missing != 0) {
          ++lacking;
          continue;
        }
        for (size_t at = 0; at < vector.sum.size(); ++at) {
          uint32_t expected = 0;
          for (size_t other = 0; other < ranks.size(); ++other) expected += value(other, vector.operation, at);
          if (vector.sum[at] != expected) REQUIRE(vector.sum[at] == expected);
        }
      }
    }
    return lacking;
  }

  // The aggregator answers nothing any more, or begins anew.
  void kill() { is_alive = false; }
  void revive() {
    std::ranges::fill(memory_, Line{});
    store_ = Store(bytes());
    is_alive = true;
  }

  std::deque<Rank> ranks;
  uint64_t now_us = 1'000;
  bool is_alive = true;

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  struct Packet {
    bool is_answer;
    size_t rank;
    std::vector<std::byte> bytes;
  };

  static uint32_t value(size_t rank, uint64_t operation, size_t at) {
    return static_cast<uint32_t>((rank + 1) * 1'000'003 * operation + at * (rank + 7));
  }
  std::span<std::byte> bytes() { return {reinterpret_cast<std::byte*>(memory_.data()), memory_.size() * 64}; }

  void send(Packet packet) {
    const auto chance = [this](double share) { return std::uniform_real_distribution(0., 1.)(random_) < share; };
    const int copies = chance(weather_.loss) ? 0 : chance(weather_.repetition) ? 2 : 1;
    for (int copy = 0; copy < copies; ++copy) {
      const uint64_t jitter_us = weather_.jitter_us == 0 ? 0 : random_() % weather_.jitter_us;
      on_the_way_.emplace(now_us + weather_.delay_us + jitter_us, packet);
    }
  }

  void step(size_t at) {
    Rank& rank = ranks[at];
    if (now_us < rank.stands_until_us) return;
    rank.client->look(now_us);
    std::array<std::byte, PACKET_MAX_BYTES> out;
    while (const size_t size_bytes = rank.client->next_datagram(now_us, out))
      send({.is_answer = false, .rank = at, .bytes = {out.begin(), out.begin() + static_cast<ptrdiff_t>(size_bytes)}});
    for (const Client::Ended& ended : rank.client->take_ended()) {
      const auto found = std::ranges::find(rank.vectors, ended.message, &Rank::Vector::message);
      REQUIRE(found != rank.vectors.end());
      REQUIRE(!found->has_ended);
      found->has_ended = true;
      found->missing = ended.blocks_missing;
    }
  }

  void arrive(const Packet& packet) {
    if (packet.is_answer) {
      if (now_us >= ranks[packet.rank].stands_until_us) ranks[packet.rank].client->take_datagram(now_us, packet.bytes);
      return;
    }
    if (!is_alive) return;
    Endpoint from{};
    from.family = 4;
    from.port = static_cast<uint16_t>(packet.rank);
    Answers answers;
    store_.take(packet.bytes, from, answers);
    for (const auto& answer : answers.all()) {
      const auto all = answers.bytes_of(answer);
      send({.is_answer = true, .rank = answer.to.port, .bytes = {all.begin(), all.end()}});
    }
  }

  // As the ranks of an operation do over their own flows: who lacks something says so.
  void tell() {
    std::vector<uint64_t> failed;
    for (const Rank& rank : ranks)
      for (const Rank::Vector& vector : rank.vectors)
        if (vector.has_ended && vector.missing != 0) failed.push_back(vector.operation);
    for (Rank& rank : ranks)
      for (const Rank::Vector& vector : rank.vectors)
        if (!vector.has_ended && std::ranges::find(failed, vector.operation) != failed.end())
          rank.client->give_up(vector.operation);
  }

  const Weather weather_;
  std::mt19937_64 random_;
  std::vector<Line> memory_;
  Store store_;
  std::multimap<uint64_t, Packet> on_the_way_;
};

}  // namespace

TEST_CASE("sums come over a network that loses, repeats and reorders") {
  for (const uint16_t ranks : {2, 3, 5}) {
    for (const double loss : {0., 0.01, 0.05, 0.2}) {
      Network network(ranks, 32, {.loss = loss, .repetition = loss, .delay_us = 60, .jitter_us = loss > 0 ? 300u : 0u},
                      ranks);
      REQUIRE(network.run(10'000'000));
      for (uint64_t operation = 1; operation <= 4; ++operation)
        for (size_t rank = 0; rank < ranks; ++rank) network.post(rank, operation, operation * 9'000 + 1);
      REQUIRE(network.run(60'000'000));
      CHECK(network.check() == 0);
      for (const Rank& rank : network.ranks) CHECK(rank.counters.aggregator_failed == 0);
    }
  }
}

TEST_CASE("a rank that comes late, or stands still, is waited for") {
  Network network(3, 32, {}, 1);
  REQUIRE(network.run(1'000'000));
  network.post(0, 1, 30'000);
  network.post(1, 1, 30'000);
  CHECK_FALSE(network.run(4'000'000));
  network.post(2, 1, 30'000);
  network.ranks[1].stands_until_us = network.now_us + 2'000'000;
  REQUIRE(network.run(4'000'000));
  CHECK(network.check() == 0);
}

TEST_CASE("an aggregator that dies costs operations of its own, and serves again when it is back") {
  Network network(3, 32, {.loss = 0.01}, 1);
  REQUIRE(network.run(1'000'000));
  for (uint64_t operation = 1; operation <= 3; ++operation)
    for (size_t rank = 0; rank < 3; ++rank) network.post(rank, operation, 100'000);
  CHECK_FALSE(network.run(5'000));
  network.kill();
  for (size_t rank = 0; rank < 3; ++rank) network.ranks[rank].stands_until_us = 0;
  // Within the time without answers that means death, whatever each rank had.
  CHECK_FALSE(network.run(2'000'000));
  CHECK(network.check() >= 3);
  const uint64_t failed = network.ranks[0].counters.aggregator_failed;
  CHECK(failed >= 1);
  network.revive();
  uint64_t operation = 4, summed = 0;
  for (; operation < 40; ++operation) {
    for (size_t rank = 0; rank < 3; ++rank) network.post(rank, operation, 5'000);
    REQUIRE(network.run(3'000'000));
    network.check();
    summed += network.ranks[0].vectors.back().missing == 0;
  }
  CHECK(summed > 20);
  for (const Rank& rank : network.ranks) CHECK(rank.counters.blocks_summed > 0);
}

TEST_CASE("a rank that runs another operation gets no sum") {
  Network network(2, 32, {}, 1);
  REQUIRE(network.run(1'000'000));
  network.post(0, 1, 5'000);
  network.post(1, 2, 5'000);  // another mark for the same blocks
  CHECK_FALSE(network.run(200'000));
  // The one that came second is refused. The other one waits for its group to find that out.
  const auto& first = network.ranks[0].vectors[0];
  const auto& second = network.ranks[1].vectors[0];
  CHECK(first.has_ended != second.has_ended);
  CHECK(first.missing + second.missing == 15);
}
