// SPDX-License-Identifier: Apache-2.0
// How a waiting thread spins, yields and sleeps, in virtual time.
#include <doctest/doctest.h>

#include <algorithm>

#include "executor/backoff.hpp"

using namespace sennit;

TEST_CASE("a wait spins, yields and sleeps; once a yield took long, waits sleep at once for a while") {
  using Action = Backoff::Action;
  Backoff backoff(BackoffPolicy::choose(8, 2));
  uint64_t now_us = 1'000;
  // One round in which nothing moves.
  const auto wait = [&](uint64_t passed_us) {
    now_us += passed_us;
    backoff.begin_round(now_us);
    return backoff.next(now_us);
  };
  CHECK(wait(0) == Action::spin);
  CHECK(wait(1) == Action::yield);
  CHECK(wait(50) == Action::yield);
  CHECK(wait(50) == Action::sleep);
  CHECK(wait(5'000) == Action::sleep);  // long in a sleep: that says nothing about yields
  backoff.reset();
  CHECK(wait(5'000) == Action::spin);
  CHECK(wait(1) == Action::yield);
  // The message came while another process had the core, again and again. Each time waits sleep for longer.
  for (uint64_t crowded_us = Backoff::CROWDED_MIN_US; crowded_us < 2 * Backoff::CROWDED_MAX_US; crowded_us *= 2) {
    CAPTURE(crowded_us);
    now_us += Backoff::LONG_YIELD_US;
    backoff.begin_round(now_us);
    backoff.reset();
    const uint64_t until_us = now_us + std::min(crowded_us, Backoff::CROWDED_MAX_US);
    CHECK(wait(until_us - 1 - now_us - 1) == Action::spin);
    CHECK(wait(1) == Action::sleep);
    backoff.reset();
    CHECK(wait(1) == Action::spin);
    CHECK(wait(1) == Action::yield);
  }
  // After a time without long yields it starts anew.
  backoff.begin_round(now_us + 1);
  backoff.reset();
  CHECK(wait(3 * Backoff::CROWDED_MAX_US) == Action::spin);
  CHECK(wait(1) == Action::yield);
  now_us += Backoff::LONG_YIELD_US;
  backoff.begin_round(now_us);
  backoff.reset();
  CHECK(wait(Backoff::CROWDED_MIN_US) == Action::spin);
  CHECK(wait(1) == Action::yield);
  backoff = Backoff(BackoffPolicy::choose(2, 2));  // A rank with its own core goes on as before.
  CHECK((wait(0) == Action::spin && wait(10) == Action::yield && wait(Backoff::LONG_YIELD_US) == Action::sleep));
  backoff.reset();
  CHECK((wait(0) == Action::spin && wait(10) == Action::yield));
}
