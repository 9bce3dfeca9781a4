// SPDX-License-Identifier: Apache-2.0
// Callbacks that post collectives: all ranks number these in one order, whenever the callbacks begin.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/engine_group.hpp"

using namespace sennit;
using test::Group;
using test::LoadedPlan;
using test::PlanWriter;
using test::wait_until;

namespace {

constexpr uint64_t DEADLINE_US = 100'000'000;
constexpr uint32_t COUNT = 16;

// A sum of `value` of each rank. All sums have one size, so that the transport cannot tell two that are mixed up.
class Sum {
 public:
  Sum(const Group& group, uint32_t rank, float value, uint64_t timeout_us = 0)
      : world_(static_cast<uint32_t>(group.engines.size())), value_(value), in_(COUNT, value), out_(COUNT) {
    const LoadedPlan plan(PlanWriter::allreduce(world_, rank, COUNT * sizeof(float)));
    const sennit_buffer buffers[] = {{in_.data(), COUNT * sizeof(float)}, {out_.data(), COUNT * sizeof(float)}};
    const sennit_post_options options{timeout_us, SENNIT_POST_ASYNC, 0, 1.0, nullptr, 0, 0};
    char error[1024] = "";
    posted = sennit_post(group.comm(rank), plan.handle, buffers, 2, &options, &op_, error, sizeof error);
    refusal = error;
  }
  ~Sum() {
    if (body_) wait_until([this] { return has_returned.load(); });
    if (op_ == nullptr) return;
    sennit_wait(op_, DEADLINE_US);
    sennit_op_release(op_);
  }
  Sum(const Sum&) = delete;

  void then(std::function<void()> body) {
    body_ = std::move(body);
    CHECK(sennit_op_on_done_in_order(op_, &call, this) == SENNIT_OK);
  }
  sennit_status wait() { return sennit_wait(op_, DEADLINE_US); }
  std::string error() const { return sennit_op_error(op_); }
  uint64_t number() const { return sennit_op_sequence(op_); }
  bool is_right() {
    return wait() == SENNIT_OK && out_ == std::vector<float>(COUNT, value_ * static_cast<float>(world_));
  }

  sennit_status posted = SENNIT_PENDING;
  std::string refusal;
  std::atomic<bool> has_begun{false}, has_returned{false};

 private:
  static void call(void* self) {
    auto& sum = *static_cast<Sum*>(self);
    sum.has_begun = true;
    sum.body_();
    sum.has_returned = true;
  }

  const uint32_t world_;
  const float value_;
  std::vector<float> in_, out_;
  std::function<void()> body_;
  sennit_op* op_ = nullptr;
};

void on_each_rank(const Group& group, const std::function<void(uint32_t)>& program) {
  std::vector<std::thread> ranks;
  for (uint32_t rank = 0; rank < group.engines.size(); ++rank) ranks.emplace_back(program, rank);
  for (std::thread& rank : ranks) rank.join();
}

// Ranks 0 and 1 run a program. Rank 2 posts its collectives in the order that the test expects, and the first of them
// only when both have asked for a callback of theirs: it cannot have ended before that.
class Trio : public Group {
 public:
  explicit Trio(Route::Kind kind = Route::Kind::shm, uint64_t blocked_us = EngineConfig{}.blocked_us)
      : Group(3, DEADLINE_US, kind, 1, blocked_us) {}

  void run(const std::vector<float>& expected, const std::function<void(uint32_t)>& program) const {
    on_each_rank(*this, [&](uint32_t rank) {
      if (rank != 2) return program(rank);
      wait_until([this] { return asked_ == 2; });
      for (const float value : expected) CHECK(Sum(*this, rank, value).is_right());
    });
  }
  void open() const { ++asked_; }

 private:
  mutable std::atomic<uint32_t> asked_{0};
};

// A program that is the same on all ranks: each sum has a callback that posts the sums of its children, and may wait
// for them.
struct Node {
  float value = 0;
  bool waits = false;
  std::vector<Node> children;

  static Node draw(std::mt19937& random, uint32_t depth, float& values) {
    Node node{.value = ++values, .waits = random() % 3 == 0, .children = {}};
    for (uint32_t i = depth == 0 ? 0 : random() % 4; i != 0; --i)
      node.children.push_back(draw(random, depth - 1, values));
    return node;
  }
};

// One rank in such a program. It dawdles now and then.
class Runner {
 public:
  Runner(const Group& group, uint32_t rank, uint32_t seed) : group_(group), rank_(rank), random_(seed * 100 + rank) {}

  void run(const Node& root) {
    post(root.children);
    {
      std::unique_lock lock(mutex_);
      REQUIRE(returned_.wait_for(lock, std::chrono::microseconds(DEADLINE_US), [this] { return open_ == 0; }));
    }
    for (const auto& sum : sums_) CHECK(sum->is_right());
  }

 private:
  void post(const std::vector<Node>& nodes) {
    std::vector<Sum*> posted;
    for (const Node& node : nodes) {
      dawdle();
      auto sum = std::make_unique<Sum>(group_, rank_, node.value);
      REQUIRE(sum->posted == SENNIT_OK);
      posted.push_back(sum.get());
      {
        const std::lock_guard lock(mutex_);
        sums_.push_back(std::move(sum));
        if (!node.children.empty()) ++open_;
      }
      if (!node.children.empty())
        posted.back()->then([this, &node] {
          dawdle();
          post(node.children);
          const std::lock_guard lock(mutex_);
          if (--open_ == 0) returned_.notify_all();
        });
      if (node.waits) CHECK(posted[draw() % posted.size()]->is_right());
    }
  }

  uint32_t draw() {
    const std::lock_guard lock(mutex_);
    return static_cast<uint32_t>(random_());
  }
  void dawdle() {
    for (uint32_t i = draw() % 4 == 0 ? draw() % 20 : 0; i != 0; --i) std::this_thread::yield();
  }

  const Group& group_;
  const uint32_t rank_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Sum>> sums_;
  uint32_t open_ = 0;  // callbacks that have not returned
};

}  // namespace

TEST_CASE("what a callback posts comes before what was posted after it was asked for, early or late") {
  for (const Route::Kind kind : {Route::Kind::shm, Route::Kind::udp}) {
    const Trio group(kind);
    group.run({1, 10, 100, 1'000, 10'000}, [&](uint32_t rank) {
      std::atomic<bool> has_posted{false};
      std::unique_ptr<Sum> of_callback;
      Sum first(group, rank, 1);
      first.then([&] {
        if (rank == 0) wait_until([&] { return has_posted.load(); });
        Sum waited(group, rank, 10);
        CHECK(waited.is_right());
        of_callback = std::make_unique<Sum>(group, rank, 100);
      });
      group.open();
      if (rank == 1) wait_until([&] { return first.has_returned.load(); });
      Sum second(group, rank, 1'000), third(group, rank, 10'000);
      has_posted = true;
      CHECK(second.is_right());
      CHECK(third.is_right());
      CHECK(first.is_right());
      CHECK(of_callback->is_right());
      CHECK(first.number() == 1);
      CHECK(of_callback->number() == 3);
      CHECK(third.number() == 5);
    });
  }
}

TEST_CASE("random programs of callbacks in callbacks end alike on ranks that dawdle") {
  for (uint32_t seed = 0; seed < 10; ++seed) {
    const uint32_t world = 2 + seed % 2;
    const Group group(world, DEADLINE_US, seed % 4 == 0 ? Route::Kind::udp : Route::Kind::shm);
    std::mt19937 random(seed);
    float values = 0;
    Node root;
    for (int i = 0; i < 4; ++i) root.children.push_back(Node::draw(random, 2, values));
    CAPTURE(seed);
    on_each_rank(group, [&](uint32_t rank) { Runner(group, rank, seed).run(root); });
  }
}

TEST_CASE("callbacks begin in the order in which they were asked for") {
  const Group group(2, DEADLINE_US);
  on_each_rank(group, [&](uint32_t rank) {
    std::vector<int> begun;
    Sum first(group, rank, 1), second(group, rank, 2);
    // On rank 1, `first` has ended when its callback is asked for.
    if (rank == 1) CHECK(first.is_right());
    second.then([&] { begun.push_back(2); });
    first.then([&] { begun.push_back(1); });
    wait_until([&] { return first.has_returned && second.has_returned; });
    CHECK(begun == std::vector{2, 1});
  });
}

TEST_CASE("a callback that waits for a later collective takes it first, and that one's callback too") {
  const Trio group;
  group.run({1, 2, 3, 4, 5}, [&](uint32_t rank) {
    std::atomic<Sum*> later{nullptr};
    std::unique_ptr<Sum> of_callback;
    Sum first(group, rank, 1);
    first.then([&] {
      wait_until([&] { return later.load() != nullptr; });
      CHECK(later.load()->is_right());
      wait_until([&] { return later.load()->has_returned.load(); });
      of_callback = std::make_unique<Sum>(group, rank, 4);
      CHECK(of_callback->is_right());
    });
    Sum second(group, rank, 2), third(group, rank, 3);
    third.then([] {});
    later = &third;
    group.open();
    if (rank == 1) wait_until([&] { return first.has_returned.load(); });
    Sum last(group, rank, 5);
    CHECK(last.is_right());
    CHECK(second.number() == 2);
    CHECK(third.number() == 3);
    CHECK(of_callback->number() == 4);
  });
}

TEST_CASE("a callback that blocks for too long loses its place, and may post no collective then") {
  const Trio group(Route::Kind::shm, 200'000);
  group.run({1, 3, 4, 5}, [&](uint32_t rank) {
    std::mutex of_user;
    std::string refusal;
    Sum first(group, rank, 1);
    {
      const std::lock_guard lock(of_user);
      first.then([&] {
        const std::lock_guard inner(of_user);
        refusal = Sum(group, rank, 2).refusal;
      });
      group.open();
      Sum second(group, rank, 3);
      CHECK(second.is_right());
    }
    wait_until([&] { return first.has_returned.load(); });
    CHECK(refusal.find("a callback of allreduce") == 0);
    CHECK(refusal.find("operation 2") != std::string::npos);
    // Others still run, in any order.
    Sum third(group, rank, 4);
    third.then([&] { CHECK(Sum(group, rank, 5).is_right()); });
    wait_until([&] { return third.has_returned.load(); });
  });
}

TEST_CASE("a callback that waits for another group's operation does not block") {
  const Trio group(Route::Kind::shm, 2'000'000);
  const Group other(3, DEADLINE_US);
  std::atomic<uint32_t> waiting{0};
  std::thread late([&] {
    wait_until([&] { return waiting == 2; });
    // For longer than a callback may block while others wait.
    const uint64_t begin_us = clock_us();
    wait_until([&] { return clock_us() - begin_us > 1'000'000; });
    CHECK(Sum(other, 2, 2).is_right());
  });
  group.run({1, 3, 4}, [&](uint32_t rank) {
    Sum first(group, rank, 1);
    first.then([&] {
      Sum of_other(other, rank, 2);
      ++waiting;
      CHECK(of_other.is_right());
      CHECK(Sum(group, rank, 3).is_right());
    });
    group.open();
    CHECK(Sum(group, rank, 4).is_right());
  });
  late.join();
}

TEST_CASE("collectives that wait for a callback end with their group, and at their deadline") {
  for (const bool aborts : {true, false}) {
    const Group group(2, DEADLINE_US);
    std::atomic<bool> is_over{false};
    Sum first(group, 0, 1);
    first.then([&] { wait_until([&] { return is_over.load(); }); });
    Sum peer(group, 1, 1);
    wait_until([&] { return first.has_begun.load(); });
    Sum second(group, 0, 2, aborts ? 0 : 100'000);
    second.then([] {});
    CHECK(second.number() == 0);
    if (aborts) sennit_abort(group.comm(0), "a test");
    CHECK(second.wait() == (aborts ? SENNIT_ABORTED : SENNIT_TIMEOUT));
    if (!aborts) CHECK(second.error().find("waits for callbacks of earlier operations") != std::string::npos);
    wait_until([&] { return second.has_returned.load(); });
    is_over = true;
  }
}
