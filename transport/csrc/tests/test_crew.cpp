// SPDX-License-Identifier: Apache-2.0
// One thread drives the operations that nobody waits for, of all groups of a process, and one answers their peers.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "executor/crew.hpp"
#include "tests/engine_group.hpp"

using namespace sennit;
using test::Group;
using test::LoadedPlan;
using test::PlanWriter;
using test::wait_until;

namespace {

constexpr uint64_t DEADLINE_US = 20'000'000;
constexpr size_t COUNT = 10'000;  // floats: beyond what travels eagerly

size_t threads_here() {
  const std::filesystem::directory_iterator folder("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(folder), end(folder)));
}

// A hand whose turns are the test's.
class Hand final : public Crewed {
 public:
  using Body = std::function<Turn(Hand&)>;
  Hand(std::shared_ptr<Crew> crew, Body body) : crew_(std::move(crew)), body_(std::move(body)) {
    seat_ = crew_->join(*this);
  }
  void call() { crew_->call(seat_); }
  void relieve() { crew_->relieve(seat_); }

  Turn take_turn(bool) override {
    ++turns;
    return body_(*this);
  }
  bool sleeps_by_itself() const override { return false; }
  uint64_t prepare_sleep(std::vector<pollfd>* fds, uint64_t now_us) override {
    REQUIRE(fds != nullptr);
    fds->push_back({bell.fd, POLLIN, 0});
    ++sleeps;
    return now_us + DEADLINE_US;
  }
  void sleep_by_itself(uint64_t) override { FAIL("not asked for"); }
  void end_sleep(const std::vector<pollfd>&) override { bell.silence(); }
  void interrupt() override { FAIL("not asked for"); }
  void relieved() override { is_relieved = true; }

  std::atomic<uint32_t> turns{0}, sleeps{0};
  std::atomic<bool> is_relieved{false};
  const WakeEvent bell;

 private:
  const std::shared_ptr<Crew> crew_;
  const Body body_;
  std::shared_ptr<Crew::Seat> seat_;
};

// An AllReduce of rank `rank` that nobody waits for.
class Background {
 public:
  Background(const Group& group, uint32_t rank)
      : in_(COUNT, static_cast<float>(rank + 1)), out_(COUNT), plan_(PlanWriter::allreduce(2, rank, COUNT * 4)) {
    const sennit_buffer buffers[] = {{in_.data(), COUNT * 4}, {out_.data(), COUNT * 4}};
    const sennit_post_options options{0, SENNIT_POST_ASYNC, 0, 1.0, nullptr, 0, 0};
    REQUIRE(sennit_post(group.comm(rank), plan_.handle, buffers, 2, &options, &op_, nullptr, 0) == SENNIT_OK);
  }
  ~Background() { sennit_op_release(op_); }
  Background(const Background&) = delete;
  sennit_op* op() const { return op_; }
  sennit_status status() const { return sennit_op_status(op_); }
  bool is_right() const { return out_ == std::vector<float>(COUNT, 3); }

 private:
  std::vector<float> in_, out_;
  const LoadedPlan plan_;
  sennit_op* op_ = nullptr;
};

}  // namespace

TEST_CASE("all groups of a process share two threads, which end with the last group") {
  std::thread([] {}).join();  // a sanitizer may start one of its own with the first
  const size_t before = threads_here();
  {
    std::vector<std::unique_ptr<Group>> groups;
    for (const Route::Kind kind : {Route::Kind::shm, Route::Kind::udp})
      for (int i = 0; i < 3; ++i) groups.push_back(std::make_unique<Group>(2, DEADLINE_US, kind));
    std::vector<std::unique_ptr<Background>> operations;
    for (const auto& group : groups)
      for (const uint32_t rank : {0u, 1u}) operations.push_back(std::make_unique<Background>(*group, rank));
    CHECK(threads_here() == before + 2);
    for (const auto& operation : operations) {
      wait_until([&] { return operation->status() != SENNIT_PENDING; });
      CHECK(operation->status() == SENNIT_OK);
      CHECK(operation->is_right());
    }
  }
  CHECK(threads_here() == before);
  // Another group starts them again.
  const Group group(2, DEADLINE_US);
  const Background first(group, 0), second(group, 1);
  wait_until([&] { return first.status() == SENNIT_OK && second.status() == SENNIT_OK; });
  CHECK(threads_here() == before + 2);
}

TEST_CASE("a callback that blocks holds up no other group") {
  std::atomic<bool> is_held{false}, is_released{false};
  struct Flags {
    std::atomic<bool>&is_held, &is_released;
  } flags{is_held, is_released};
  const Group blocked(2, DEADLINE_US), other(2, DEADLINE_US, Route::Kind::udp);
  Background mine(blocked, 0);
  const auto hold = [](void* argument) {
    const auto& shared = *static_cast<Flags*>(argument);
    shared.is_held = true;
    while (!shared.is_released) std::this_thread::yield();
  };
  REQUIRE(sennit_op_on_done(mine.op(), hold, &flags) == SENNIT_OK);
  Background theirs(blocked, 1);
  wait_until([&] { return is_held.load(); });
  for (int i = 0; i < 3; ++i) {
    const Background first(other, 0), second(other, 1);
    wait_until([&] { return first.status() != SENNIT_PENDING && second.status() != SENNIT_PENDING; });
    CHECK(first.is_right());
    CHECK(second.is_right());
  }
  CHECK_FALSE(is_released);
  is_released = true;
  wait_until([&] { return theirs.status() != SENNIT_PENDING; });
  const Background again(blocked, 0), again_too(blocked, 1);
  wait_until([&] { return again.status() != SENNIT_PENDING && again_too.status() != SENNIT_PENDING; });
  CHECK(again.is_right());
}

TEST_CASE("who is relieved has no thread of the crew inside any more") {
  const auto crew = std::make_shared<Crew>();
  Hand other(crew, [](Hand&) { return Crewed::Turn::off; });  // so the crew's thread goes on
  for (int i = 0; i < 50; ++i) {
    std::atomic<bool> is_inside{false}, may_go{false};
    Hand hand(crew, [&](Hand&) {
      is_inside = true;
      while (!may_go) std::this_thread::yield();
      for (int yields = 0; yields < 100; ++yields) std::this_thread::yield();
      is_inside = false;
      return Crewed::Turn::moved;
    });
    hand.call();
    wait_until([&] { return is_inside.load(); });
    std::thread opener([&] { may_go = true; });
    hand.relieve();
    CHECK_FALSE(is_inside);
    CHECK(hand.is_relieved);
    const uint32_t turns = hand.turns;
    hand.call();
    opener.join();
    CHECK(hand.turns == turns);
  }
  other.relieve();
}

TEST_CASE("the crew sleeps once for all, and wakes for a call, for a descriptor and for who leaves") {
  const auto crew = std::make_shared<Crew>();
  const auto idle = [](Hand&) { return Crewed::Turn::sleep; };
  Hand first(crew, idle), second(crew, idle);
  first.call();
  second.call();
  wait_until([&] { return first.sleeps != 0 && second.sleeps != 0; });
  for (int i = 0; i < 20; ++i) {
    const uint32_t turns = second.turns;
    first.bell.ring();
    wait_until([&] { return second.turns != turns; });
    const uint32_t more = first.turns;
    second.call();
    wait_until([&] { return first.turns != more; });
  }
  std::atomic<uint32_t> quick_turns{0};
  Hand quick(crew, [&](Hand&) { return ++quick_turns < 10'000 ? Crewed::Turn::moved : Crewed::Turn::off; });
  quick.call();
  wait_until([&] { return quick_turns == 10'000; });
  first.relieve();
  second.relieve();
  CHECK(quick.turns == 10'000);  // off: no more until a call
  quick.relieve();
}

#if !defined(__SANITIZE_THREAD__)  // which has no threads after a fork
TEST_CASE("a child of fork makes its own crew") {
  const Group group(2, DEADLINE_US);
  const Background first(group, 0), second(group, 1);
  wait_until([&] { return first.status() == SENNIT_OK && second.status() == SENNIT_OK; });
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // The child does not use doctest, which belongs to the parent.
    const auto crew = of_process<Crew>();
    std::atomic<bool> is_done{false};
    Hand hand(crew, [&](Hand&) {
      is_done = true;
      return Crewed::Turn::off;
    });
    hand.call();
    const uint64_t deadline_us = clock_us() + DEADLINE_US;
    while (!is_done && clock_us() < deadline_us) std::this_thread::yield();
    hand.relieve();
    _exit(is_done && threads_here() == 1 ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
#endif
