// SPDX-License-Identifier: Apache-2.0
// The parts of a flow on their own: sequence numbers, round-trip time, the record index, the control codec.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <stdexcept>
#include <vector>

#include "flow/ack_pacing.hpp"
#include "flow/agenda.hpp"
#include "flow/control.hpp"
#include "flow/immediate.hpp"
#include "flow/outstanding.hpp"
#include "flow/receive_budget.hpp"
#include "flow/receiver.hpp"
#include "flow/rtt.hpp"
#include "flow/sender.hpp"
#include "flow/sequence_ring.hpp"
#include "sim.hpp"

using namespace sennit;
using namespace sennit::flow;

TEST_CASE("Sequence numbers are found again from their low bits, across every wrap") {
  for (const uint64_t reference : {0ull, 5ull, 0xF'FFFFull, 0x10'0000ull, 0xFFFF'FFF0ull, 0x1'0000'0004ull}) {
    for (int64_t offset = -1'000; offset <= 1'000; ++offset) {
      const uint64_t number = reference + static_cast<uint64_t>(offset);
      CHECK(nearest<32>(static_cast<uint32_t>(number), reference) == number);
      CHECK(nearest<20>(static_cast<uint32_t>(number) & INDEX_MASK, reference) == number);
    }
  }
  CHECK(credit_slot(0) == 1);
  CHECK(credit_slot(4'094) == 4'095);
  CHECK(credit_slot(4'095) == 1);
}

TEST_CASE("An agenda visits exactly the members that are awake or whose time has come") {
  SimRandom random(23);
  for (int run = 0; run < 20; ++run) {
    Agenda agenda;
    std::vector<uint64_t> due_us;  // what a plain list would say: 0 is ready, NEVER_US asleep
    uint64_t now_us = 0, visits = 0;
    for (int step = 0; step < 2'000; ++step) {
      if (due_us.size() < 40 && random.below(10) == 0) {
        REQUIRE(agenda.join() == due_us.size());
        due_us.push_back(0);
      }
      if (due_us.empty()) continue;
      if (random.below(3) == 0) {
        const auto woken = static_cast<uint32_t>(random.below(due_us.size()));
        agenda.wake(woken);
        due_us[woken] = 0;
      }
      now_us += random.below(50);
      agenda.wake_due(now_us);
      std::vector<uint32_t> expected, ready = agenda.ready();
      for (uint32_t member = 0; member < due_us.size(); ++member)
        if (due_us[member] <= now_us) expected.push_back(member);
      std::sort(ready.begin(), ready.end());
      REQUIRE(ready == expected);
      visits += expected.size();
      agenda.settle(now_us, [&](uint32_t member) {
        const uint64_t kind = random.below(4);
        return due_us[member] = kind == 0 ? 0 : kind == 1 ? Agenda::NEVER_US : now_us + random.below(400);
      });
      REQUIRE(agenda.visits() == visits);
      uint64_t earliest_us = Agenda::NEVER_US;
      for (uint64_t& at_us : due_us) {
        if (at_us <= now_us) at_us = 0;  // stayed ready
        if (at_us != 0) earliest_us = std::min(earliest_us, at_us);
      }
      REQUIRE(agenda.next_due_us() == earliest_us);
    }
  }
}

TEST_CASE("Counts that travel as 32 bits go on over many wraps, and an old one changes nothing") {
  // 2^32 packets are 16 TiB: a day of training.
  SimRandom random(11);
  Sender sender({});
  sender.on_granted(static_cast<uint32_t>(-5));  // from before the start
  CHECK(sender.granted_packets() == 0);
  Grants grants(nullptr, 4'096);
  uint64_t received = 0, number = 0, index = 0;
  for (int wraps = 0; wraps < 9; wraps = static_cast<int>(received >> 32)) {
    const uint64_t before = received;
    received += random.below(uint64_t{1} << 30);
    const uint32_t granted = grants.issue(0, received, 0);
    sender.on_granted(granted);
    REQUIRE(sender.granted_packets() == received + GRANT_UNLIMITED_PACKETS);
    sender.on_granted(grants.issue(0, before, 0));  // overtaken on the way
    REQUIRE(sender.granted_packets() == received + GRANT_UNLIMITED_PACKETS);
    const uint64_t next = number + random.below(uint64_t{1} << 31);
    REQUIRE(nearest<32>(static_cast<uint32_t>(next), number) == next);
    REQUIRE(nearest<32>(static_cast<uint32_t>(number), next) == number);
    number = next;
    const uint64_t step = random.below(uint64_t{1} << (INDEX_BITS - 1));
    REQUIRE(nearest<INDEX_BITS>(static_cast<uint32_t>(index + step) & INDEX_MASK, index) == index + step);
    index += step;
  }
}

TEST_CASE("Round-trip estimates follow RFC 6298") {
  RoundTrip round_trip;
  CHECK(round_trip.rto_us() == RTO_INITIAL_US);
  round_trip.add_sample(40'000);
  CHECK(round_trip.smoothed_us() == 40'000);
  CHECK(round_trip.rto_us() == 40'000 + 4 * 20'000);
  round_trip.add_sample(48'000);  // rttvar = 3/4 * 20,000 + 1/4 * 8,000; srtt = 7/8 * 40,000 + 1/8 * 48,000
  CHECK(round_trip.smoothed_us() == 41'000);
  CHECK(round_trip.rto_us() == 41'000 + 4 * 17'000);
  CHECK(round_trip.min_us() == 40'000);
  for (int i = 0; i < 200; ++i) round_trip.add_sample(50);
  CHECK(round_trip.rto_us() == RTO_MIN_US);
  CHECK(round_trip.pto_us(400) == 2 * round_trip.smoothed_us() + 400);
  CHECK(round_trip.pto_us(0) == PTO_MIN_US);
  for (int i = 0; i < 200; ++i) round_trip.add_sample(UINT64_MAX);
  CHECK(round_trip.rto_us() == RTO_MAX_US);
}

TEST_CASE("The record index agrees with a map under random insertions and removals") {
  SimRandom random(1);
  Outstanding outstanding(256);
  RecordList list;
  std::map<uint32_t, uint32_t> expected;  // immediate -> id
  for (int step = 0; step < 200'000; ++step) {
    // Few distinct immediates, close together: collisions and long probes are frequent.
    const uint32_t immediate =
        make_immediate(static_cast<uint32_t>(random.below(4)), static_cast<uint32_t>(random.below(120)));
    const uint32_t found = outstanding.find(immediate);
    if (const auto known = expected.find(immediate); known != expected.end()) {
      REQUIRE(found == known->second);
      outstanding.unlink(list, found);
      outstanding.erase(found);
      expected.erase(known);
    } else {
      REQUIRE(found == NO_RECORD);
      if (outstanding.full()) continue;
      const uint32_t id = outstanding.insert(DataOut{0, 0, immediate, nullptr, 0});
      outstanding.push_back(list, id);
      expected[immediate] = id;
    }
    REQUIRE(outstanding.size() == expected.size());
  }
  size_t listed = 0;
  for (uint32_t id = list.head; id != NO_RECORD; id = outstanding[id].next) ++listed;
  CHECK(listed == expected.size());
}

TEST_CASE("A sequence ring keeps numbers across growth") {
  SequenceRing<uint64_t> ring;
  SimRandom random(2);
  for (int step = 0; step < 10'000; ++step) {
    if (ring.empty() || random.chance(0.52)) {
      const uint64_t number = ring.end();
      CHECK(ring.push(number * 3) == number);
    } else {
      CHECK(ring.front() == ring.first() * 3);
      ring.pop();
    }
    if (!ring.empty()) CHECK(ring[ring.end() - 1] == (ring.end() - 1) * 3);
  }
}

TEST_CASE("A control payload has the bytes of docs/reference/wire.md") {
  std::array<std::byte, 256> out{};
  ControlWriter writer(out);
  writer.header.flags = CONTROL_ASK;
  writer.header.completed_below = 0x0403'0201;
  writer.header.credits_seen = 0x1413'1211;
  writer.header.eager_received = 7;
  writer.header.eager_consumed = 6;
  writer.header.advert_first = 9;
  writer.add_done_word(0x5);
  writer.add_eager_word(0x8000'0000'0000'0001);
  writer.header.granted = 0x0102'0304;
  writer.header.queue_us = 0x0506;
  REQUIRE(writer.add_echo({0x0010'0002, 33, 5, 0x1234, 0x0102, 7}));
  REQUIRE(writer.begin_sack(12, 70, 1));
  writer.add_sack_word(0x80);
  REQUIRE(writer.add_advert({0x1122'3344'5566'7788, 0xAABB'CCDD, 4'096, true, 1, 2, 3}));
  Keys keys = 0x20;
  keys.count = 3;
  keys.of[1] = 0x0102'0304;
  keys.of[2] = 0xFFFF'FFFE;
  REQUIRE(writer.add_advert({0x10, keys, 0x30, false, 0, 0, 0}));
  const size_t size_bytes = writer.finish();
  const std::array<uint8_t, 156> expected{
      4, 1, 1, 1, 1, 0, 1, 0, 2, 0, 0, 0,                                      // version to reason bytes
      1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 7, 0, 0, 0, 6, 0, 0, 0, 9, 0, 0, 0,  // cumulative fields
      4, 3, 2, 1, 6, 5, 0, 0,                                                  // grant, queueing
      5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0x80,                       // done,
                                                                               // eager
      2, 0, 0x10, 0, 33, 0, 0, 5, 0x34, 0x12, 2, 1, 7, 0, 0, 0,                // echo
      12, 0, 0, 0, 70, 0, 0, 0, 1, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0,         // SACK
      0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xDD, 0xCC, 0xBB, 0xAA, 0, 0x10, 0, 0x80, 1, 0, 0, 0, 0, 0, 0, 0,
      2, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0,              // first part of a message
      0x10, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0x30, 0, 0, 0x20,  // a later part, with three keys
      4, 3, 2, 1, 0xFE, 0xFF, 0xFF, 0xFF};
  REQUIRE(size_bytes == expected.size());
  CHECK(std::memcmp(out.data(), expected.data(), expected.size()) == 0);

  ControlReader reader;
  REQUIRE(reader.parse(std::span(out).first(size_bytes)));
  CHECK(reader.header().eager_received == 7);
  CHECK(reader.done()[0] == 5);
  CHECK(reader.header().granted == 0x0102'0304);
  CHECK(reader.header().queue_us == 0x0506);
  CHECK(reader.echo(0).delay_us == 33);
  CHECK(reader.echo(0).path == 5);
  CHECK(reader.echo(0).received == 0x1234);
  CHECK(reader.echo(0).marked == 0x0102);
  CHECK(reader.echo(0).waited_us == 7);
  CHECK(reader.each_sack(
      [](const Sack& sack) { return sack.credit == 12 && sack.first_missing == 70 && sack.words[0] == 0x80; }));
  CHECK(reader.each_advert([](uint32_t index, const Advert& advert) {
    return index == 0 ? advert.first_part && advert.message_bytes == 3 && advert.keys.count == 1
                      : advert.part_bytes == 0x30 && !advert.first_part && advert.keys.count == 3 &&
                            advert.keys.of[2] == 0xFFFF'FFFE;
  }));
  CHECK_FALSE(reader.parse(std::span(out).first(size_bytes + 1)));
}

TEST_CASE("A configuration out of range is refused before anything is sent") {
  std::vector<std::byte> memory(64 * 4'096);
  const auto make = [&](const FlowConfig& config) { Flow(config, memory, 1); };
  CHECK_NOTHROW(make({}));
  CHECK_THROWS_AS(make({.path_count = 0}), std::invalid_argument);
  CHECK_THROWS_AS(make({.path_count = 257}), std::invalid_argument);
  CHECK_THROWS_AS(make({.payload_max_bytes = 1'022}), std::invalid_argument);
  CHECK_THROWS_AS(make({.path_count = 4, .rail_count = 5}), std::invalid_argument);
  CHECK_THROWS_WITH_AS(make({.path_policy = "random"}), "path_policy \"random\"; allowed: round_robin, reps",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(make({.congestion = "cubic"}), "congestion \"cubic\"; allowed: dctcp, fixed, swift",
                       std::invalid_argument);
  CHECK_NOTHROW(make({.path_policy = "reps", .congestion = "swift"}));
  CHECK_THROWS_AS(make({.eager_slot_count = 48}), std::invalid_argument);
  CHECK_THROWS_AS(make({.eager_slot_count = 128}), std::invalid_argument);  // more than the memory holds
}

TEST_CASE("A window ring keeps what it holds while its window slides and widens") {
  SimRandom random(2);
  SlidingRing<uint64_t> ring;
  uint64_t first = 0, end = 0;
  for (int step = 0; step < 20'000; ++step) {
    const uint64_t limit = 1 + static_cast<uint64_t>(step) / 100;
    if (end - first < limit && random.chance(0.6)) {
      ring.cover(first, end + 1);
      ring[end] = end * 7;
      ++end;
    } else if (first != end) {
      ++first;
    }
    for (uint64_t number = first; number != end; ++number) REQUIRE(ring[number] == number * 7);
  }
}

TEST_CASE(
    "Reordering between paths hurries no acknowledgement; a gap on a single path, a short end and a new rail do") {
  const FlowConfig config{.path_count = 4, .ack_every_packets = 8, .ack_delay_us = 160, .rail_count = 2};
  AckPacing pacing(config);
  CHECK(pacing.wait_us({.path = 0, .in_order = true}) == 10);  // a rail's first
  CHECK(pacing.wait_us({.path = 2, .in_order = false}) == 160);
  CHECK(pacing.wait_us({.path = 3, .in_order = false}) == 10);  // the other rail's
  CHECK(pacing.wait_us({.path = 1, .in_order = false}) == 160);
  CHECK(pacing.wait_us({.path = 1, .in_order = true, .ends_short = true}) == 10);
  CHECK(pacing.wait_us({.path = 1, .in_order = true, .message_complete = true}) == 0);
  CHECK(pacing.wait_us({.path = 0, .in_order = true}) == 160);
  CHECK(pacing.wait_us({.path = 0, .in_order = true}) == 0);  // the eighth
  pacing.on_acknowledged();
  CHECK(pacing.wait_us({.path = 0, .in_order = true}) == 160);

  AckPacing single({.path_count = 1, .ack_every_packets = 8, .ack_delay_us = 160});
  CHECK(single.wait_us({.path = 0, .in_order = true}) == 10);
  CHECK(single.wait_us({.path = 0, .in_order = true}) == 160);
  CHECK(single.wait_us({.path = 0, .in_order = false}) == 10);

  // Twice in a window of four packets.
  AckPacing narrow({.path_count = 4, .window_bytes = 4 * 4'096, .ack_every_packets = 8, .ack_delay_us = 160});
  CHECK(narrow.wait_us({.path = 0, .in_order = true}) != 0);
  CHECK(narrow.wait_us({.path = 0, .in_order = true}) == 0);
}

TEST_CASE("Credits whose state did not fit into a control are first in the next") {
  constexpr uint32_t PAYLOAD_BYTES = 64, MESSAGES = 100;
  Receiver receiver({.payload_max_bytes = PAYLOAD_BYTES});
  std::vector<std::byte> memory(2 * PAYLOAD_BYTES);
  SequenceRing<Event> events;
  for (uint64_t id = 0; id < MESSAGES; ++id) {
    receiver.advertise(id, {id, 0, memory.size()}, memory.data(), 1);
    REQUIRE(receiver.classify(make_immediate(credit_slot(id), 0), PAYLOAD_BYTES) == Verdict::place);
    receiver.on_data(make_immediate(credit_slot(id), 0), PAYLOAD_BYTES, events);
  }
  std::vector<uint32_t> told;
  const auto write = [&] {
    std::array<std::byte, 1'024> payload;
    ControlWriter writer(payload);
    receiver.write_sacks(writer);
    const size_t size_bytes = writer.finish();
    ControlReader reader;
    REQUIRE(reader.parse(std::span(payload).first(size_bytes)));
    reader.each_sack([&](const Sack& sack) {
      told.push_back(sack.credit);
      return true;
    });
  };
  uint32_t controls = 0;
  do {
    write();
    ++controls;
  } while (receiver.has_postponed_sacks());
  // Each credit is reported once before any is reported twice: about fifty fit.
  CHECK(controls <= 3);
  std::ranges::sort(told);
  told.erase(std::ranges::unique(told).begin(), told.end());
  CHECK(told.size() == MESSAGES);
}

TEST_CASE("Places are predicted behind the newest arrival, or from a packet that was seen coming") {
  FlowConfig config;
  config.payload_max_bytes = 64;
  Receiver receiver(config);
  std::array<std::byte, 640> memory;  // two messages of five packets
  receiver.advertise(1, {1, 7, 320}, memory.data(), 9);
  receiver.advertise(2, {2, 7, 320}, memory.data() + 320, 9);
  SequenceRing<Event> events;
  const auto indices = [](std::span<const Placement> places) {
    std::vector<size_t> out;
    for (const Placement& place : places) out.push_back((slot_of(place.immediate) - 1) * 5 + index_of(place.immediate));
    return out;
  };
  std::array<Placement, 4> places;
  const auto from = [&](uint32_t slot, uint32_t index) {
    return indices(std::span(places).first(receiver.predict_from(make_immediate(slot, index), places)));
  };
  receiver.on_data(make_immediate(1, 1), 64, events);
  CHECK(indices(std::span(places).first(receiver.predict(places))) == std::vector<size_t>{2, 3, 4, 5});
  CHECK(from(1, 0) == std::vector<size_t>{0, 2, 3, 4});  // skips packets that are already there
  CHECK(from(2, 3) == std::vector<size_t>{8, 9});
  CHECK(places[0].destination == memory.data() + 8 * 64);
  CHECK(from(2, 5).empty());           // behind the end of the last
  CHECK(from(3, 0).empty());           // not advertised
  CHECK(from(EAGER_SLOT, 0).empty());  // elsewhere
  for (const uint32_t index : {0u, 2u, 3u, 4u}) receiver.on_data(make_immediate(1, index), 64, events);
  CHECK(from(1, 0).empty());  // complete
}
