// SPDX-License-Identifier: Apache-2.0
// Processor time of callers in the transport, and the names of its own threads.
#include <doctest/doctest.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "executor/lent_time.hpp"
#include "tests/engine_group.hpp"

using namespace sennit;
using test::Group;
using test::LoadedPlan;
using test::PlanWriter;

namespace {

uint64_t own_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// Until the thread's own clock says so, whatever else runs on the machine.
void work_us(uint64_t least_us) {
  const uint64_t end_ns = own_ns() + least_us * 1000;
  while (own_ns() < end_ns) {
  }
}

uint64_t lent_by(const std::function<void()>& body) {
  const uint64_t before = LentTime::total_ns();
  body();
  return LentTime::total_ns() - before;
}

struct Counting {
  Counting() { LentTime::count(true); }
  ~Counting() { LentTime::count(false); }
};

std::vector<std::string> thread_names() {
  std::vector<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    names.push_back(name);
  }
  return names;
}

// Names of the threads that take a signal of the process.
std::vector<std::string> names_with(int signal) {
  std::vector<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name, line, blocked;
    std::getline(std::ifstream(task.path() / "comm"), name);
    std::ifstream status(task.path() / "status");
    while (std::getline(status, line))
      if (line.starts_with("SigBlk:")) blocked = line.substr(7);
    if ((std::stoull(blocked, nullptr, 16) >> (signal - 1) & 1) == 0) names.push_back(name);
  }
  return names;
}

}  // namespace

TEST_CASE("nothing is counted unless somebody asks") {
  CHECK(lent_by([] {
          const LentTime lent;
          work_us(1'000);
        }) == 0);
  { const Counting counting, again; }
  LentTime::count(false);  // one too many does no harm
  CHECK(lent_by([] { const LentTime lent; }) == 0);
}

TEST_CASE("the time of all threads is counted, nested calls once, and none of the transport's own") {
  const Counting counting;
  const uint64_t before_ns = own_ns();
  const uint64_t nested_ns = lent_by([] {
    const LentTime outer;
    {
      const LentTime inner;
      work_us(2'000);
    }
    // The inner one has ended, the outer one goes on.
    work_us(1'000);
  });
  CHECK(nested_ns >= 3'000'000);
  CHECK(nested_ns <= own_ns() - before_ns);
  CHECK(lent_by([] {
          std::thread other([] {
            const LentTime lent;
            work_us(1'000);
          });
          other.join();
        }) >= 1'000'000);
  CHECK(lent_by([] {
          std::thread own([] {
            begin_own_thread("sennit-own");
            const LentTime lent;
            work_us(1'000);
          });
          own.join();
        }) == 0);
}

TEST_CASE("posts and waits are lent time, and threads of a group have names") {
  const Counting counting;
  constexpr size_t COUNT = 1 << 20;
  const Group group(2, 20'000'000);
  const uint64_t lent_ns = lent_by([&] {
    std::array<std::thread, 2> ranks;
    for (uint32_t rank : {0u, 1u}) {
      ranks[rank] = std::thread([&group, rank] {
        std::vector<float> in(COUNT, 1), out(COUNT);
        const LoadedPlan plan(PlanWriter::allreduce(2, rank, COUNT * 4));
        const sennit_buffer buffers[] = {{in.data(), COUNT * 4}, {out.data(), COUNT * 4}};
        const sennit_post_options options{0, 0, 0, 1.0, nullptr, 0, 0};
        sennit_op* op = nullptr;
        REQUIRE(sennit_post(group.comm(rank), plan.handle, buffers, 2, &options, &op, nullptr, 0) == SENNIT_OK);
        CHECK(sennit_wait(op, 0) == SENNIT_OK);
        sennit_op_release(op);
      });
    }
    for (std::thread& rank : ranks) rank.join();
  });
  CHECK(lent_ns > 0);
  const std::vector<std::string> names = thread_names();
  CHECK(std::count(names.begin(), names.end(), "sennit-answer") == 1);
}

TEST_CASE("signals are for threads of the program, and for those of callbacks, which run its code") {
  const Group group(2, 20'000'000);
  // It has its name when it has begun.
  std::vector<std::string> names;
  for (const auto begin = own_ns(); std::count(names.begin(), names.end(), "sennit-answer") == 0;) {
    REQUIRE(own_ns() < begin + 10'000'000'000);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    names = thread_names();
  }
  const std::vector<std::string> reached = names_with(SIGTERM);
  CHECK(std::count(reached.begin(), reached.end(), "sennit-answer") == 0);
  CHECK(std::count(reached.begin(), reached.end(), "sennit-callback") ==
        std::count(names.begin(), names.end(), "sennit-callback"));
  CHECK(names_with(SIGPROF).size() == names.size());
}
