// SPDX-License-Identifier: Apache-2.0
// The timers of loss recovery on their own: what they wait for, step by step.
#include <doctest/doctest.h>

#include <algorithm>

#include "flow/recovery.hpp"

using namespace sennit::flow;

namespace {

// A sender's recovery with a round-trip time of 100 us on path 0, thus a probe timeout of 350, and the peer's
// acknowledgement delay of 2,000.
struct Sampled {
  FlowCounters counters{};
  Recovery recovery{{.path_count = 2, .ack_delay_us = 2'000}, counters};
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

TEST_CASE("The timeout of a tail counts from its last packet, not from packets sent long before") {
  Sampled sender;
  sender.recovery.set_tail(1'000, false);
  sender.recovery.on_sent(1'000, 0, Sampled::packet(2));
  sender.recovery.on_sent(1'900, 1, Sampled::packet(3));
  sender.recovery.set_tail(1'900, true);
  CHECK(sender.recovery.next_timeout_us() == 1'900 + 350);
}

TEST_CASE("If a probe's answer does not cover all packets, another probe follows, without backoff") {
  Sampled sender;
  for (const uint32_t immediate : {2, 3}) sender.recovery.on_sent(1'000, 0, Sampled::packet(immediate));
  sender.recovery.set_tail(1'000, true);
  uint64_t now_us = 1'000;
  CHECK(sender.next_probe(now_us) == 2);
  CHECK(now_us == 1'000 + 350);
  // Whichever copy it was, nothing is known of packet 3.
  sender.recovery.on_acked(now_us + 10, 2);
  sender.recovery.end_of_acks(now_us + 10);
  CHECK(sender.next_probe(now_us) == 3);
  CHECK(now_us <= 1'000 + 350 + 2 * 350);
  CHECK(sender.counters.local_ack_timeout_err == 0);
}

// A rank that did not run reads the sockets of its rails one after the other. The answer to a packet may be in the last
// of them, and those to later packets of its path in the first.
TEST_CASE("A later packet's answer condemns nothing before the timer, when everything has been read") {
  const auto answer_to_later = [](Sampled& sender) {
    for (const uint32_t immediate : {2, 3}) sender.recovery.on_sent(1'000, 0, Sampled::packet(immediate));
    sender.recovery.on_acked(9'000, 3);
    sender.recovery.end_of_acks(9'000);
    CHECK_FALSE(sender.recovery.has_lost());
    CHECK(sender.recovery.next_timeout_us() <= 9'000);
  };
  Sampled late, lost;
  answer_to_later(late);
  late.recovery.on_acked(9'000, 2);
  late.recovery.end_of_acks(9'000);
  late.recovery.on_timeout(9'000);
  CHECK_FALSE(late.recovery.has_lost());
  answer_to_later(lost);
  lost.recovery.on_timeout(9'000);
  CHECK(lost.recovery.has_lost());
}
