// SPDX-License-Identifier: Apache-2.0
// Two ranks over a network port, in one process: a small version of the message layer, with every byte checked.
#pragma once

#include <doctest/doctest.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "messages/lane.hpp"
#include "ports/roce_offer.hpp"
#include "tests/offers.hpp"

namespace sennit::test {

inline uint64_t now_us() {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

inline std::vector<std::byte> noise(std::mt19937_64& random, size_t size_bytes) {
  std::vector<std::byte> out(size_bytes + 8);
  for (size_t i = 0; i < out.size() - 7; i += 8) {
    const uint64_t value = random();
    std::memcpy(out.data() + i, &value, 8);
  }
  out.resize(size_bytes);
  return out;
}

// One rank's message layer: adverts are answered with the message of the same key.
template <class PortUnderTest>
class PortRank final : public LaneSink {
 public:
  template <class Config>
  PortRank(uint32_t rank, const Config& config, uint32_t size = 2) : rank_(rank), port(rank, size, config) {}

  bool on_eager(uint32_t, const MessageHeader& header, uint32_t, const std::byte* data) override {
    if (refusals_left-- > 0) return false;
    eager_received.emplace_back(header.key, std::vector(data, data + header.size_bytes));
    return true;
  }
  void on_advert(uint32_t, const MessageHeader& header, uint64_t advert_id) override {
    const auto found = outgoing.find(header.key);
    if (found == outgoing.end()) return;  // wanted, but never sent
    const auto& message = found->second;
    CHECK(message.size() == header.size_bytes);
    port.lane(1 - rank_).transfer(header.key, advert_id, message.data(), message.size());
  }
  void on_received(uint64_t receive_id, const std::byte* data, uint64_t loan_id) override {
    if (loan_id != 0) {
      const uint64_t size_bytes = incoming_sizes.at(receive_id);
      incoming[receive_id].assign(data, data + size_bytes);
      CHECK(port.lane(1 - rank_).release(loan_id));
    }
    CHECK(received.insert(receive_id).second);
  }
  void on_sent(uint64_t send_id) override { CHECK(sent.insert(send_id).second); }
  void on_peer_lost(uint32_t, std::string reason) override { lost_reason = std::move(reason); }

  void expect(uint64_t key, uint64_t size_bytes, bool as_loan) {
    incoming_sizes[key] = size_bytes;
    if (!as_loan) incoming[key].resize(size_bytes + 1);  // never null, also for an empty message
    port.lane(1 - rank_).advertise(key, {key, 7, size_bytes}, as_loan ? nullptr : incoming[key].data());
  }
  uint64_t counter(const std::string& name) const {
    for (const auto& [known, value] : port.counters())
      if (known == name) return value;
    FAIL("no counter " << name);
    return 0;
  }

 private:
  uint32_t rank_;

 public:
  PortUnderTest port;
  std::map<uint64_t, std::vector<std::byte>> outgoing, incoming;
  std::map<uint64_t, uint64_t> incoming_sizes;
  std::set<uint64_t> received, sent;
  std::vector<std::pair<uint64_t, std::vector<std::byte>>> eager_received;
  int refusals_left = 0;
  std::string lost_reason;
};

template <class PortUnderTest>
struct PortPair {
  PortRank<PortUnderTest> a, b;
  uint64_t progress_calls = 0;
  template <class Config>
  explicit PortPair(const Config& config) : PortPair(config, [](RoceOffer&) {}) {}
  template <class Config>
  PortPair(const Config& config, const Config& other)
      : PortPair(
            config, other, [](RoceOffer&) {}, 2) {}
  template <class Config, class Change>
  PortPair(const Config& config, Change change, uint32_t size = 2) : PortPair(config, config, change, size) {}
  template <class Config, class Change>
  PortPair(const Config& config, const Config& other, Change change, uint32_t size)
      : a(0, config, size), b(1, other, size) {
    for (auto [from, to, rank] : {std::tuple{&a, &b, 0u}, std::tuple{&b, &a, 1u}}) {
      RoceOffer offer = RoceOffer::decode(info_of(from->port, rank == 0 ? 1 : 0));
      change(offer);
      to->port.connect(rank, offer.encode(), *to);
    }
  }
  template <class Done>
  void run_until(Done done) {
    const uint64_t deadline_us = now_us() + 30'000'000;
    while (!done()) {
      const bool moved = a.port.progress(now_us()) | b.port.progress(now_us());
      ++progress_calls;
      if (!moved) {
        std::vector<pollfd> readable;
        a.port.append_poll_fds(readable);
        b.port.append_poll_fds(readable);
        poll(readable.data(), readable.size(), 1);
      }
      REQUIRE_MESSAGE(now_us() < deadline_us, a.port.lane(1).describe() << "\n" << b.port.lane(0).describe());
    }
  }
};

template <class PortUnderTest>
void exchange(PortPair<PortUnderTest>& pair, uint64_t seed, const std::vector<uint64_t>& sizes, bool as_loan) {
  std::mt19937_64 random(seed);
  const uint64_t first_key = seed << 20;
  for (auto* rank : {&pair.a, &pair.b})
    for (size_t i = 0; i < sizes.size(); ++i) rank->outgoing[first_key + i] = noise(random, sizes[i]);
  for (auto* rank : {&pair.a, &pair.b})
    for (size_t i = 0; i < sizes.size(); ++i) rank->expect(first_key + i, sizes[i], as_loan);
  const auto done = [&](const auto& rank) {
    return rank.received.size() == rank.incoming_sizes.size() && rank.sent.size() == rank.outgoing.size();
  };
  pair.run_until([&] { return done(pair.a) && done(pair.b) && pair.a.port.idle() && pair.b.port.idle(); });
  for (size_t i = 0; i < sizes.size(); ++i) {
    const uint64_t key = first_key + i;
    CAPTURE(sizes[i]);
    // Not memcmp, because an empty vector may have no address at all.
    const auto arrived = [&](const std::vector<std::byte>& incoming, const std::vector<std::byte>& outgoing) {
      return std::equal(outgoing.begin(), outgoing.begin() + static_cast<ptrdiff_t>(sizes[i]), incoming.begin());
    };
    REQUIRE(arrived(pair.a.incoming[key], pair.b.outgoing[key]));
    REQUIRE(arrived(pair.b.incoming[key], pair.a.outgoing[key]));
  }
}

// Rank a waits for rank b: without end while b runs, and no longer than `peer_timeout_us` while b does not. The test's
// own virtual time passes at once.
template <class PortUnderTest>
void check_that_silence_is_noticed(PortPair<PortUnderTest>& pair, uint64_t peer_timeout_us) {
  constexpr uint64_t LOOK_US = 50'000;
  uint64_t at_us = now_us();
  const auto wait = [&](uint64_t duration_us, bool b_runs) {
    const uint64_t until_us = at_us + duration_us;
    while (at_us < until_us && pair.a.lost_reason.empty()) {
      at_us += LOOK_US;
      pair.a.port.lane(1).expect(at_us);
      pair.a.port.progress(at_us);
      if (b_runs) pair.b.port.progress(at_us);
    }
  };
  wait(20 * peer_timeout_us, true);
  CHECK(pair.a.lost_reason.empty());
  const uint64_t frozen_us = at_us;
  wait(20 * peer_timeout_us, false);
  CHECK(pair.a.lost_reason.starts_with("gave no sign of life for "));
  CHECK(at_us - frozen_us <= peer_timeout_us + LOOK_US);
  CHECK(pair.a.port.lane(1).silent_us() >= peer_timeout_us / 2);
}

}  // namespace sennit::test
