// SPDX-License-Identifier: Apache-2.0
// Threads that share work: every element once, in any number of threads.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <stdexcept>
#include <vector>

#include "executor/team.hpp"

using namespace sennit;

TEST_CASE("parts cover every element once, whatever the counts") {
  for (const uint32_t threads : {1u, 2u, 3u, 7u}) {
    for (const uint64_t spin_us : {0u, 50u}) {
      ThreadTeam team(threads, spin_us);
      CHECK(team.threads() == threads);
      std::vector<uint8_t> visits(10'000);
      std::mt19937 random(threads);
      for (int job = 0; job < 500; ++job) {
        const uint64_t count = random() % visits.size(), part_min = random() % 300, step = 1 + random() % 100;
        std::fill(visits.begin(), visits.end(), uint8_t{0});
        team.share(count, part_min, step, [&](uint32_t part, uint64_t begin, uint64_t end) {
          if (part >= threads || begin % step != 0) return;  // and the count below is wrong
          for (uint64_t at = begin; at < end; ++at) ++visits[at];
        });
        REQUIRE(static_cast<uint64_t>(std::count(visits.begin(), visits.end(), 1)) == count);
      }
    }
  }
}

TEST_CASE("workers run beside the caller, asleep before or not") {
  for (const uint64_t spin_us : {0u, 1'000'000u}) {
    ThreadTeam team(3, spin_us);
    for (int job = 0; job < 20; ++job) {
      // Each part ends when all three have begun: one thread alone would never end the first.
      std::atomic<uint32_t> begun{0};
      std::atomic<bool> is_late{false};
      const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      team.share(3, 1, 1, [&](uint32_t, uint64_t, uint64_t) {
        ++begun;
        while (begun < 3 && !is_late)
          if (std::chrono::steady_clock::now() > give_up) is_late = true;
      });
      REQUIRE(begun == 3);
      REQUIRE_FALSE(is_late);
    }
  }
}

TEST_CASE("a number of threads out of range is refused with the range") {
  for (const uint32_t threads : {0u, ThreadTeam::MAX_THREADS + 1})
    CHECK_THROWS_WITH_AS(ThreadTeam(threads, 0), doctest::Contains("allowed: 1..64"), std::invalid_argument);
}
