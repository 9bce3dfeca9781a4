// SPDX-License-Identifier: Apache-2.0
// Threads that share work: every element once, in any number of threads, whichever groups work at the same time.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "executor/team.hpp"
#include "ports/of_process.hpp"
#include "tests/in_child.hpp"

using namespace sennit;

TEST_CASE("parts cover every element once, whatever the counts") {
  for (const uint32_t threads : {1u, 2u, 3u, 7u}) {
    for (const uint64_t spin_us : {0u, 50u}) {
      const TeamUse team(threads, spin_us);
      CHECK(team.threads() == threads);
      std::vector<uint8_t> visits(10'000);
      std::mt19937 random(threads);
      for (int job = 0; job < 500; ++job) {
        const uint64_t count = random() % visits.size(), part_min = random() % 300, step = 1 + random() % 100;
        std::fill(visits.begin(), visits.end(), uint8_t{0});
        team.take(count, part_min).share(count, step, [&](uint32_t part, uint64_t begin, uint64_t end) {
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
    const TeamUse team(3, spin_us);
    for (int job = 0; job < 20; ++job) {
      // Each part ends when all three have begun: one thread alone would never end the first.
      std::atomic<uint32_t> begun{0};
      std::atomic<bool> is_late{false};
      const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      team.take(3, 1).share(3, 1, [&](uint32_t, uint64_t, uint64_t) {
        ++begun;
        while (begun < 3 && !is_late)
          if (std::chrono::steady_clock::now() > give_up) is_late = true;
      });
      REQUIRE(begun == 3);
      REQUIRE_FALSE(is_late);
    }
  }
}

TEST_CASE("a group that finds the team at work does its own alone, and a group of fewer threads takes no more") {
  const TeamUse one(3, 0), other(3, 0), small(2, 0);
  {
    const ThreadTeam::Turn busy = one.take(3, 1);
    REQUIRE(busy.threads() == 3);
    ThreadTeam::Turn alone = other.take(3, 1);
    CHECK(alone.threads() == 1);
    uint64_t done = 0;
    alone.share(100, 1, [&](uint32_t part, uint64_t begin, uint64_t end) { done += part == 0 ? end - begin : 0; });
    CHECK(done == 100);
  }
  CHECK(small.take(100, 1).threads() == 2);
  CHECK(other.take(100, 1).threads() == 3);
  CHECK(other.take(1, 1).threads() == 1);  // too little to share
}

TEST_CASE("ten groups that work at the same time share the workers of one, and each element is visited once") {
  constexpr uint32_t GROUP_COUNT = 10, THREADS = 3;
  std::vector<std::unique_ptr<TeamUse>> groups;
  for (uint32_t group = 0; group < GROUP_COUNT; ++group) groups.push_back(std::make_unique<TeamUse>(THREADS, 20));
  CHECK(of_process<ThreadTeam>()->worker_count() == THREADS - 1);
  std::atomic<uint32_t> wrong{0}, shared{0};
  std::vector<std::thread> drivers;
  for (uint32_t group = 0; group < GROUP_COUNT; ++group)
    drivers.emplace_back([&, group] {
      std::vector<uint32_t> visits(3'000);
      for (uint32_t job = 1; job <= 200; ++job) {
        ThreadTeam::Turn team = groups[group]->take(visits.size(), 100);
        if (team.threads() == THREADS) ++shared;
        team.share(visits.size(), 7, [&](uint32_t, uint64_t begin, uint64_t end) {
          for (uint64_t at = begin; at < end; ++at) ++visits[at];
        });
        if (std::count(visits.begin(), visits.end(), job) != static_cast<ptrdiff_t>(visits.size())) ++wrong;
      }
      groups[group].reset();  // while others work
    });
  for (std::thread& driver : drivers) driver.join();
  CHECK(wrong == 0);
  CHECK(shared > 0);
}

TEST_CASE("the team grows to the largest group, and a child of fork has its own") {
  const TeamUse small(2, 0);
  const std::shared_ptr<ThreadTeam> ours = of_process<ThreadTeam>();
  CHECK(ours->worker_count() == 1);
  const TeamUse large(4, 0);
  CHECK(of_process<ThreadTeam>() == ours);
  CHECK(ours->worker_count() == 3);
  test::check_in_child([&](const test::Child& child) {
    const TeamUse own(2, 0);
    CHILD_REQUIRE(child, of_process<ThreadTeam>() != ours);
    uint64_t parts[2] = {};
    own.take(100, 1).share(100, 1, [&](uint32_t part, uint64_t begin, uint64_t end) { parts[part] = end - begin; });
    CHILD_REQUIRE(child, parts[0] == 50 && parts[1] == 50);
  });
}

TEST_CASE("a number of threads out of range is refused with the range") {
  for (const uint32_t threads : {0u, ThreadTeam::MAX_THREADS + 1})
    CHECK_THROWS_WITH_AS(TeamUse(threads, 0), doctest::Contains("allowed: 1..64"), std::invalid_argument);
}
