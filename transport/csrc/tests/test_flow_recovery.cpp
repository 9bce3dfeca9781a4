// SPDX-License-Identifier: Apache-2.0
// The timers of loss recovery by themselves: what they wait for, step by step.
#include <doctest/doctest.h>

#include <algorithm>

#include "flow/recovery.hpp"

using namespace sennit::flow;

namespace {

// A sender's recovery with a round trip of 100 us on path 0, so a probe timeout of 350, and the peer's
// acknowledgement delay 2,000.
struct Sampled {
  FlowCounters counters{};
  Recovery recovery{{.path_count = 2, .ack_delay_us = 2'000, .rail_count = 2}, counters};
  Sampled() {
    recovery.on_sent(0, 0, packet(1));
    recovery.on_echo(100, {.immediate = 1, .delay_us = 0, .path = 0, .received = 1, .marked = 0, .waited_us = 0}, 0);
    recovery.on_acked(100, 1);
  }
  static DataOut packet(uint32_t immediate) { return {0, 0, immediate, nullptr, 4'096}; }
  // Lets the timers run; the immediate of the next probe.
  uint32_t next_probe(uint64_t& now_us) {
    DataOut out{};
    uint32_t path = 0;
    for (int steps = 0; steps < 100; ++steps) {
      now_us = std::max(now_us, recovery.next_timeout_us());
      recovery.on_timeout(now_us);
      while (recovery.take_tail_mark(now_us, path)) {
      }
      if (recovery.take_probe(now_us, out, path)) return out.immediate;
      if (counters.local_ack_timeout_err != 0) return 0;
    }
    return 0;
  }
};

}  // namespace

TEST_CASE("What was sent long before a tail is not overdue because the tail is there") {
  Sampled sender;
  sender.recovery.set_tail(1'000, false);
  sender.recovery.on_sent(1'000, 0, Sampled::packet(2));
  sender.recovery.on_sent(1'900, 1, Sampled::packet(3));
  sender.recovery.set_tail(1'900, true);
  CHECK(sender.recovery.next_timeout_us() == 1'900 + 350);
}

TEST_CASE("A probe whose answer says nothing of the rest is followed by another, not backed off") {
  Sampled sender;
  for (const uint32_t immediate : {2, 3}) sender.recovery.on_sent(1'000, 0, Sampled::packet(immediate));
  sender.recovery.set_tail(1'000, true);
  uint64_t now_us = 1'000;
  CHECK(sender.next_probe(now_us) == 2);
  CHECK(now_us == 1'000 + 350);
  // Whichever copy it was: nothing is known of packet 3.
  sender.recovery.on_acked(now_us + 10, 2);
  sender.recovery.end_of_acks(now_us + 10);
  CHECK(sender.next_probe(now_us) == 3);
  CHECK(now_us <= 1'000 + 350 + 2 * 350);
  CHECK(sender.counters.local_ack_timeout_err == 0);
}

TEST_CASE("A wrong verdict doubles the wait once a round trip, to two of them, until packets come in order") {
  RoundTrip round_trip;
  round_trip.add_sample(4'000);
  Reordering reordering;
  CHECK(!reordering.is_seen());
  CHECK(reordering.deadline_us(round_trip) == 5'000);
  CHECK(reordering.jitter_us(round_trip) == 0);
  uint64_t serial = 1;
  for (const uint64_t deadline_us : {5'000, 6'000, 8'000, 8'000}) {
    reordering.on_wrong_verdict(serial, serial + 10);
    reordering.on_wrong_verdict(serial + 9, serial + 11);  // known already when it was sent
    CHECK(reordering.is_seen());
    CHECK(reordering.deadline_us(round_trip) == deadline_us);
    CHECK(reordering.jitter_us(round_trip) == deadline_us - 4'000);
    serial += 10;
  }
  for (const bool is_overtaken : {true, false}) {
    for (int packet = 0; packet < 65'535; ++packet) reordering.on_arrival(false);
    CHECK(reordering.is_seen());
    reordering.on_arrival(is_overtaken);
  }
  CHECK(!reordering.is_seen());
  CHECK(reordering.deadline_us(round_trip) == 5'000);
}

TEST_CASE("Packets that three later ones condemned, and that come all the same, end that rule on their rail only") {
  Sampled sender;
  const auto send = [&](uint64_t now_us, uint32_t path, uint32_t first) {
    for (uint32_t immediate = first; immediate < first + 4; ++immediate)
      sender.recovery.on_sent(now_us, path, Sampled::packet(immediate));
  };
  const auto acknowledge = [&](uint64_t now_us, uint32_t immediate) {
    sender.recovery.on_acked(now_us, immediate);
    sender.recovery.end_of_acks(now_us);
  };
  send(200, 0, 10);
  acknowledge(290, 13);
  REQUIRE(sender.recovery.has_lost());
  for (const uint32_t immediate : {10, 11, 12}) acknowledge(295, immediate);
  CHECK(!sender.recovery.has_lost());
  // The same again: it is waited for.
  send(400, 0, 20);
  acknowledge(490, 23);
  CHECK(!sender.recovery.has_lost());
  CHECK(sender.recovery.next_timeout_us() == 400 + 150);
  for (const uint32_t immediate : {20, 21, 22}) acknowledge(495, immediate);
  send(600, 1, 30);
  acknowledge(690, 33);
  CHECK(sender.recovery.has_lost());
}

TEST_CASE("A packet that was sent again is judged by when its acknowledgement comes") {
  // Round trip in the fabric: 100 us. Sent again at 300; before 400 it is the first that is acknowledged.
  for (const uint64_t acked_us : {350, 450}) {
    CAPTURE(acked_us);
    Sampled sender;
    for (const uint32_t immediate : {10, 11, 12, 13}) sender.recovery.on_sent(200, 0, Sampled::packet(immediate));
    sender.recovery.on_acked(290, 13);
    sender.recovery.end_of_acks(290);
    while (sender.recovery.has_lost()) sender.recovery.resend(300, 0);
    for (const uint32_t immediate : {10, 11, 12}) sender.recovery.on_acked(acked_us, immediate);
    sender.recovery.end_of_acks(acked_us);
    CHECK(sender.recovery.paths().rail(0).reordering.is_seen() == (acked_us == 350));
    CHECK(!sender.recovery.paths().rail(1).reordering.is_seen());
  }
}
