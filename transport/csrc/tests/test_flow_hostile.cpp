// SPDX-License-Identifier: Apache-2.0
// Whatever the network brings, a flow counts it and goes on.
#include <doctest/doctest.h>

#include "flow/control.hpp"
#include "flow/immediate.hpp"
#include "sim_peer.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

const flow::FlowConfig CONFIG{.payload_max_bytes = 512, .eager_slot_count = 16, .window_bytes = 32'768};
const SimLinkConfig LINK{.delay_us = 20, .rate_bytes_per_s = 400'000'000};

std::vector<std::byte> next_control(SimPair& pair) {
  std::vector<std::byte> control(flow::CONTROL_MAX_BYTES);
  uint32_t path;
  control.resize(pair.b.flow().poll_control(pair.network.now_us(), control, path));
  return control;
}

}  // namespace

namespace {

void check_random_controls(uint64_t first_seed, uint64_t last_seed) {
  for (uint64_t seed = first_seed; seed <= last_seed; ++seed) {
    CAPTURE(seed);
    SimRandom random(seed);
    SimPair pair(seed, CONFIG, LINK, LINK);
    pair.exchange(random_messages(random, 10, 512, 60'000), random_messages(random, 10, 512, 60'000));
    pair.network.run(random.below(2'000), [] { return false; });
    const uint64_t before = pair.a.flow().counters().bad_control;
    uint64_t sent = 0;
    for (int i = 0; i < 100; ++i) {
      std::vector<std::byte> noise(random.below(200));
      for (std::byte& byte : noise) byte = static_cast<std::byte>(random.next());
      if (!noise.empty() && random.chance(0.9)) noise[0] = std::byte{flow::CONTROL_VERSION};
      // The counts of sections fit, so that the checks after the parser run too.
      if (noise.size() >= flow::CONTROL_HEADER_BYTES && random.chance(0.8)) {
        noise[1] = std::byte{0};
        for (size_t at = 2; at < 12; ++at) noise[at] = std::byte{0};
        noise.resize(flow::CONTROL_HEADER_BYTES);
      }
      pair.a.flow().on_control(pair.network.now_us(), 0, noise);
      ++sent;
    }
    CHECK(pair.a.flow().counters().bad_control > before + sent * 9 / 10);
    if (pair.a.flow().counters().bad_control == before + sent) REQUIRE(pair.run(60'000'000));
  }
}

}  // namespace

TEST_CASE("Random and mutated control payloads are counted, and the exchange goes on unless one of them was valid") {
  check_random_controls(1, 60);
}

TEST_CASE("Random control payloads, more of them" * doctest::test_suite("long")) { check_random_controls(61, 1'000); }

TEST_CASE("Every truncation of a real control payload is refused") {
  SimPair pair(1, CONFIG, LINK, LINK);
  std::byte memory[4096]{};
  for (uint64_t i = 0; i < 8; ++i) pair.b.flow().advertise(i, {i, i, 512}, memory + 512 * i, 7, 0);
  const auto control = next_control(pair);
  REQUIRE(control.size() == flow::CONTROL_HEADER_BYTES + 8 * (flow::ADVERT_BYTES + flow::ADVERT_MESSAGE_BYTES));
  for (size_t size = 0; size < control.size(); ++size) {
    pair.a.flow().on_control(0, 0, std::span(control).first(size));
    CHECK(pair.a.flow().counters().bad_control == size + 1);
  }
  pair.a.flow().on_control(0, 0, control);
  CHECK(pair.a.flow().counters().bad_control == control.size());
  flow::Event event;
  REQUIRE(pair.a.flow().poll_event(event));
  CHECK(event.kind == flow::Event::Kind::advert);
}

namespace {

// Under the sanitizers a wrong length would show here.
void check_flipped_controls(uint64_t first_seed, uint64_t last_seed) {
  for (uint64_t seed = first_seed; seed <= last_seed; ++seed) {
    CAPTURE(seed);
    SimRandom random(seed);
    SimPair pair(seed, CONFIG, LINK, LINK);
    pair.a.will_send({{1, 30'000, false}, {2, 100, true}, {3, 100'000, false}});
    std::vector<std::byte> memory(1'000'000);
    uint64_t at = 0;
    std::array<flow::DataOut, 15> batch;
    uint32_t path;
    for (int round = 0; round < 60; ++round) {
      const uint64_t now_us = static_cast<uint64_t>(round) * 500;
      if (at + 30'000 < memory.size())
        pair.b.flow().advertise(1, {9, 9, 20'000 + random.below(10'000)}, memory.data() + at, 7, now_us);
      at += 30'000;
      std::vector<std::byte> control(flow::CONTROL_MAX_BYTES);
      control.resize(pair.b.flow().poll_control(now_us, control, path));
      for (uint64_t flips = random.below(4); flips > 0 && !control.empty(); --flips)
        control[random.below(control.size())] ^= std::byte{1} << random.below(8);
      pair.a.flow().on_control(now_us, 0, control);
      flow::Event event;
      while (pair.a.flow().poll_event(event))
        if (event.kind == flow::Event::Kind::advert && event.header.size_bytes <= memory.size())
          pair.a.flow().transfer(1, event.id, memory.data(), event.header.size_bytes);
      pair.a.flow().on_timeout(now_us);
      while (const size_t count = pair.a.flow().poll_data(now_us, batch, path))
        for (size_t i = 0; i < count; ++i) {
          flow::Placement place;
          const auto verdict = pair.b.flow().locate(batch[i].immediate, batch[i].remote_address, batch[i].rkey,
                                                    batch[i].size_bytes, place);
          if (verdict != flow::Verdict::place && verdict != flow::Verdict::duplicate) continue;
          if (place.destination != nullptr) std::memcpy(place.destination, batch[i].payload, batch[i].size_bytes);
          pair.b.flow().on_data(now_us, path, batch[i].immediate, batch[i].size_bytes);
        }
      while (pair.b.flow().poll_event(event)) {
      }
    }
  }
}

}  // namespace

TEST_CASE("Bit flips in real control payloads neither crash nor write out of place") { check_flipped_controls(1, 80); }

TEST_CASE("Bit flips in more control payloads" * doctest::test_suite("long")) { check_flipped_controls(81, 1'000); }

TEST_CASE("Data outside of what is advertised is refused by name and changes counters only") {
  SimPair pair(2, CONFIG, LINK, LINK);
  flow::Flow& flow = pair.b.flow();
  std::vector<std::byte> memory(1'300, std::byte{0x5A});
  const auto address = reinterpret_cast<uint64_t>(memory.data());
  constexpr uint32_t RKEY = 0xBEEF;
  flow.advertise(1, {1, 1, 1'300}, memory.data(), RKEY, 0);
  using flow::make_immediate;
  using flow::Verdict;
  flow::Placement place;
  CHECK(flow.locate(make_immediate(1, 0), address, RKEY, 512, place) == Verdict::place);
  CHECK(place.destination == memory.data());
  CHECK(flow.locate(make_immediate(1, 2), address + 1'024, RKEY, 276, place) == Verdict::place);
  CHECK(flow.locate(make_immediate(1, 0), address, RKEY + 1, 512, place) == Verdict::bad_key);
  CHECK(flow.locate(make_immediate(1, 0), address + 4, RKEY, 512, place) == Verdict::bad_range);
  CHECK(flow.locate(make_immediate(1, 0), address, RKEY, 508, place) == Verdict::bad_range);
  CHECK(flow.locate(make_immediate(1, 2), address + 1'024, RKEY, 512, place) == Verdict::bad_range);
  CHECK(flow.locate(make_immediate(1, 3), address + 1'536, RKEY, 512, place) == Verdict::bad_range);
  CHECK(flow.locate(make_immediate(2, 0), address, RKEY, 512, place) == Verdict::bad_slot);
  CHECK(flow.locate(make_immediate(4'095, 0), address, RKEY, 512, place) == Verdict::bad_slot);
  CHECK(flow.locate(make_immediate(0, 0), pair.b.eager_address(), SimPeer::EAGER_RKEY, 32, place) == Verdict::place);
  CHECK(flow.locate(make_immediate(0, 0), pair.b.eager_address(), 1, 32, place) == Verdict::bad_key);
  CHECK(flow.locate(make_immediate(0, 0), pair.b.eager_address(), SimPeer::EAGER_RKEY, 31, place) ==
        Verdict::bad_range);
  CHECK(flow.locate(make_immediate(0, 1), pair.b.eager_address(), SimPeer::EAGER_RKEY, 32, place) ==
        Verdict::bad_range);
  CHECK(flow.locate(make_immediate(0, 16), pair.b.eager_address(), SimPeer::EAGER_RKEY, 32, place) ==
        Verdict::bad_slot);
  CHECK(flow.locate(make_immediate(0, flow::INDEX_MASK), pair.b.eager_address(), SimPeer::EAGER_RKEY, 32, place) ==
        Verdict::bad_slot);
  const flow::FlowCounters& counters = flow.counters();
  CHECK(counters.bad_key == 2);
  CHECK(counters.bad_range == 6);
  CHECK(counters.bad_slot == 4);

  SimRandom random(3);
  for (int i = 0; i < 200'000; ++i) {
    const auto immediate = static_cast<uint32_t>(random.next());
    const auto verdict = flow.locate(immediate, random.next(), static_cast<uint32_t>(random.next()),
                                     static_cast<uint32_t>(random.below(600)), place);
    REQUIRE(verdict != Verdict::place);
    REQUIRE(place.destination == nullptr);
  }
  CHECK(counters.data_packets_received == 0);
  // A port without RETHs, like verbs: only immediate and size can be checked.
  for (int i = 0; i < 200'000; ++i)
    flow.on_data(1, static_cast<uint32_t>(random.below(300)), static_cast<uint32_t>(random.next()) | 3u << 20,
                 static_cast<uint32_t>(random.below(600)));
  CHECK(counters.data_packets_received == 0);
}

TEST_CASE("A malformed eager message loses the peer") {
  struct Header {
    uint64_t key, signature, size_bytes;
    uint32_t flags, data_bytes;
  };
  constexpr uint32_t DATA_BYTES = 64 - flow::EAGER_HEADER_BYTES;
  constexpr Header GOOD{1, 2, DATA_BYTES, EAGER_DATA, DATA_BYTES};
  const auto lost_by = [](const Header& header) {
    SimPair pair(4, CONFIG, LINK, LINK);
    flow::Placement place;
    const uint32_t immediate = flow::make_immediate(0, 0);
    REQUIRE(pair.b.flow().locate(immediate, pair.b.eager_address(), SimPeer::EAGER_RKEY, 64, place) ==
            flow::Verdict::place);
    std::memset(place.destination, 0, 64);
    std::memcpy(place.destination, &header, sizeof header);
    pair.b.flow().on_data(0, 0, immediate, 64);
    flow::Event event;
    REQUIRE(pair.b.flow().poll_event(event));
    if (event.kind == flow::Event::Kind::eager) return std::string();
    REQUIRE(event.kind == flow::Event::Kind::peer_lost);
    return std::string(event.reason);
  };
  CHECK(lost_by(GOOD).empty());
  for (const Header& bad : {Header{1, 2, DATA_BYTES + 1, EAGER_DATA, DATA_BYTES},      // more than its packet holds
                            Header{1, 2, DATA_BYTES + 1, EAGER_DATA, DATA_BYTES + 1},  //
                            Header{1, 2, UINT64_MAX, EAGER_DATA, UINT32_MAX},          //
                            Header{1, 2, DATA_BYTES - 1, EAGER_DATA, DATA_BYTES - 1},  // or less
                            Header{1, 2, 1'000'000, EAGER_REQUEST, DATA_BYTES}}) {     // a request has no data
    CAPTURE(bad.size_bytes);
    CAPTURE(bad.flags);
    CHECK(lost_by(bad) == "sent a malformed eager message");
  }
}

TEST_CASE("An eager packet of another lap of numbers leaves its place to the right one") {
  constexpr uint32_t SIZE_BYTES = flow::EAGER_HEADER_BYTES;
  for (const uint32_t lap : {1u, 7u, 0x7FFF'FFFFu}) {
    CAPTURE(lap);
    SimPair pair(5, CONFIG, LINK, LINK);
    flow::Flow& flow = pair.b.flow();
    const auto arrive = [&](uint64_t key, uint32_t lap_of_packet) {
      const struct {
        uint64_t key, signature, size_bytes;
        uint32_t flags_and_lap, data_bytes;
      } header{key, 2, 0, lap_of_packet << 1 | EAGER_DATA, 0};
      flow::Placement place;
      REQUIRE(flow.locate(flow::make_immediate(0, 0), pair.b.eager_address(), SimPeer::EAGER_RKEY, SIZE_BYTES, place) ==
              flow::Verdict::place);
      std::memcpy(place.destination, &header, sizeof header);
      flow.on_data(1, 0, flow::make_immediate(0, 0), SIZE_BYTES);
    };
    flow::Event event;
    arrive(77, lap);
    CHECK_FALSE(flow.poll_event(event));
    CHECK(flow.counters().bad_slot == 1);
    CHECK(flow.counters().data_packets_received == 0);
    arrive(78, 0);
    REQUIRE(flow.poll_event(event));
    CHECK(event.kind == flow::Event::Kind::eager);
    CHECK(event.header.key == 78);
  }
}
