// SPDX-License-Identifier: Apache-2.0
// Callbacks run in threads of their own: whatever they do, the group they belong to and all others go on.
#include <doctest/doctest.h>
#include <pthread.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "executor/callbacks.hpp"
#include "tests/engine_group.hpp"

using namespace sennit;
using test::Group;
using test::LoadedPlan;
using test::PlanWriter;
using test::wait_until;

namespace {

constexpr uint64_t DEADLINE_US = 20'000'000;
constexpr uint64_t SIZE_BYTES = 40'000;  // beyond what travels eagerly

size_t threads_here() {
  const std::filesystem::directory_iterator folder("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(folder), end(folder)));
}

std::string thread_name() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return name;
}

// One message from rank 0 to rank 1, on one of the two. It calls back once it is done.
class Message {
 public:
  Message(const Group& group, uint32_t rank, uint32_t tag, uint64_t timeout_us = 0) : memory_(SIZE_BYTES) {
    PlanWriter writer(2, rank, 1, uint64_t{9} << 56);
    if (rank == 0) writer.add(StepKind::send, 1, 0, 0, 0, SIZE_BYTES, {Operand{}});
    if (rank == 1) writer.add(StepKind::receive, 0, 0, 0, 0, SIZE_BYTES);
    const LoadedPlan plan(writer.bytes());
    const sennit_buffer buffer{memory_.data(), SIZE_BYTES};
    const sennit_post_options options{timeout_us, SENNIT_POST_P2P | SENNIT_POST_ASYNC, tag, 1.0, nullptr, 0, 0};
    REQUIRE(sennit_post(group.comm(rank), plan.handle, &buffer, 1, &options, &op_, nullptr, 0) == SENNIT_OK);
  }
  ~Message() {
    if (body_) wait_until([this] { return has_returned.load(); });
    sennit_op_release(op_);
  }
  Message(const Message&) = delete;

  Message& then(std::function<void()> body) {
    body_ = std::move(body);
    CHECK(sennit_op_on_done(op_, &call, this) == SENNIT_OK);
    return *this;
  }
  sennit_status wait() { return sennit_wait(op_, 0); }
  sennit_status status() const { return sennit_op_status(op_); }

  std::atomic<bool> has_begun{false}, has_returned{false};

 private:
  static void call(void* self) {
    auto& message = *static_cast<Message*>(self);
    message.has_begun = true;
    // Also after an exception, and when the thread ends.
    struct Returned {
      ~Returned() { of.has_returned = true; }
      Message& of;
    } const returned{message};
    message.body_();
  }

  std::vector<std::byte> memory_;
  std::function<void()> body_;
  sennit_op* op_ = nullptr;
};

// Blocks callbacks until it is opened.
struct Gate {
  void pass() const {
    while (!is_open) std::this_thread::yield();
  }
  void open() { is_open = true; }
  std::atomic<bool> is_open{false};
};

constexpr uint32_t SENDER = 0, RECEIVER = 1;

}  // namespace

TEST_CASE("a callback runs in a thread of its own, neither in one that waits nor in one that posts or aborts") {
  for (const Route::Kind kind : {Route::Kind::shm, Route::Kind::udp}) {
    const Group group(2, DEADLINE_US, kind);
    std::string name;
    std::atomic<uint32_t> count{0};
    const auto note = [&] {
      name = thread_name();
      ++count;
    };
    {
      Message receive(group, RECEIVER, 1);
      receive.then(note);
      Message send(group, SENDER, 1);
      send.then([] {});
      CHECK(receive.wait() == SENNIT_OK);
    }
    CHECK(name == "sennit-callback");
    {
      Message receive(group, RECEIVER, 2);
      receive.then(note);
      sennit_abort(group.comm(RECEIVER), "a test");
      CHECK(receive.status() == SENNIT_ABORTED);
    }
    CHECK(name == "sennit-callback");
    CHECK(count == 2);
  }
}

TEST_CASE("a callback may wait for what a callback behind it does, however deep") {
  constexpr uint32_t DEPTH = 6;
  for (const Route::Kind kind : {Route::Kind::shm, Route::Kind::udp}) {
    const Group group(2, DEADLINE_US, kind);
    std::atomic<uint32_t> innermost{0};
    // Callbacks 0 to DEPTH - 1 of each rank: each waits for the next message's operation and for its callback.
    std::function<void(uint32_t, uint32_t)> descend = [&](uint32_t rank, uint32_t depth) {
      if (depth == DEPTH) {
        ++innermost;
        return;
      }
      Message next(group, rank, depth);
      next.then([&, depth] { descend(rank, depth + 1); });
      CHECK(next.wait() == SENNIT_OK);
    };
    std::thread sender([&] { descend(SENDER, 0); });
    descend(RECEIVER, 0);
    sender.join();
    CHECK(innermost == 2);
  }
}

TEST_CASE("a callback that blocks holds up neither deadlines nor waits nor other callbacks of its group") {
  const Group group(2, DEADLINE_US);
  Gate gate;
  Message held(group, RECEIVER, 1), to_held(group, SENDER, 1);
  held.then([&] { gate.pass(); });
  wait_until([&] { return held.has_begun.load(); });
  {
    Message receive(group, RECEIVER, 2), send(group, SENDER, 2);
    receive.then([] {});
    CHECK(receive.wait() == SENNIT_OK);
    CHECK(send.wait() == SENNIT_OK);
    wait_until([&] { return receive.has_returned.load(); });
  }
  {
    // Nobody waits, and nobody sends.
    Message late(group, RECEIVER, 3, 50'000);
    late.then([] {});
    wait_until([&] { return late.has_returned.load(); });
    CHECK(late.status() == SENNIT_TIMEOUT);
  }
  CHECK_FALSE(held.has_returned);
  gate.open();
}

TEST_CASE("a lock that is held around posts and waits may be taken in callbacks") {
  const Group group(2, DEADLINE_US);
  // Recursive, because a callback that is set when its operation has ended runs in the thread that sets it.
  std::recursive_mutex of_user;
  std::atomic<uint32_t> taken{0};
  std::vector<std::thread> ranks;
  for (const uint32_t rank : {SENDER, RECEIVER})
    ranks.emplace_back([&, rank] {
      std::vector<std::unique_ptr<Message>> messages;
      for (uint32_t tag = 0; tag < 50; ++tag) {
        const std::lock_guard lock(of_user);
        messages.push_back(std::make_unique<Message>(group, rank, tag));
        messages.back()->then([&] {
          const std::lock_guard inner(of_user);
          ++taken;
        });
      }
      for (const auto& message : messages) CHECK(message->wait() == SENNIT_OK);
    });
  for (std::thread& rank : ranks) rank.join();
  CHECK(taken == 100);
}

TEST_CASE("a callback may shut down another group, and its own") {
  auto other = std::make_unique<Group>(2, DEADLINE_US);
  Group own(2, DEADLINE_US);
  Message pending(*other, RECEIVER, 1);
  pending.then([] {});
  Message receive(own, RECEIVER, 1), send(own, SENDER, 1);
  receive.then([&] {
    sennit_shutdown(other->comm(RECEIVER), DEADLINE_US);
    CHECK(pending.has_returned);
    sennit_shutdown(own.comm(RECEIVER), DEADLINE_US);
  });
  CHECK(send.wait() == SENNIT_OK);
  wait_until([&] { return receive.has_returned.load(); });
  CHECK(receive.status() == SENNIT_OK);
  CHECK(pending.status() == SENNIT_ABORTED);
}

TEST_CASE("a shutdown waits for callbacks as long as it was told, and no longer") {
  const Group group(2, DEADLINE_US);
  Gate gate;
  Message receive(group, RECEIVER, 1), send(group, SENDER, 1);
  receive.then([&] { gate.pass(); });
  wait_until([&] { return receive.has_begun.load(); });
  sennit_shutdown(group.comm(RECEIVER), 1'000);
  CHECK_FALSE(receive.has_returned);
  std::thread opener([&] { gate.open(); });
  sennit_shutdown(group.comm(RECEIVER), DEADLINE_US);
  CHECK(receive.has_returned);
  opener.join();
}

TEST_CASE("callbacks go on in another thread when one throws or ends its thread") {
  const Group group(2, DEADLINE_US);
  const std::function<void()> bodies[] = {[] { throw std::runtime_error("of a user"); }, [] { pthread_exit(nullptr); },
                                          [] {}};
  uint32_t tag = 0;
  for (int round = 0; round < 3; ++round) {
    for (const auto& body : bodies) {
      Message receive(group, RECEIVER, ++tag), send(group, SENDER, tag);
      receive.then(body);
      wait_until([&] { return receive.has_returned.load(); });
    }
  }
}

TEST_CASE("threads for callbacks start with need, stay few, and end with the last group") {
  std::thread([] {}).join();  // a sanitizer may start one of its own with the first
  const size_t before = threads_here();
  {
    const Group group(2, DEADLINE_US);
    const auto exchange = [&](uint32_t tag) {
      Message receive(group, RECEIVER, tag), send(group, SENDER, tag);
      CHECK(receive.wait() == SENNIT_OK);
      CHECK(send.wait() == SENNIT_OK);
    };
    exchange(1);
    CHECK(threads_here() == before + 2);  // the crew and the answering thread
    std::atomic<uint32_t> count{0};
    std::vector<std::unique_ptr<Message>> messages;
    for (uint32_t tag = 2; tag < 100; ++tag) {
      messages.push_back(std::make_unique<Message>(group, RECEIVER, tag));
      messages.back()->then([&] { ++count; });
      messages.push_back(std::make_unique<Message>(group, SENDER, tag));
    }
    wait_until([&] { return count == 98; });
    wait_until([&] { return threads_here() <= before + 4; });
  }
  wait_until([&] { return threads_here() == before; });
}
