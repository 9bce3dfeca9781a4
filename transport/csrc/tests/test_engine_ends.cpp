// SPDX-License-Identifier: Apache-2.0
// How groups end: by several threads at once, in a child of fork, with callbacks that throw, and under a
// device's late writes.
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>

#include "ports/verbs/verbs_port.hpp"
#include "tests/engine_group.hpp"
#include "tests/fake_verbs.hpp"
#include "tests/fault_injection.hpp"
#include "tests/offers.hpp"

using namespace sennit;
using test::FakeVerbs;
using test::Group;
using test::LoadedPlan;
using test::PlanWriter;

namespace {

constexpr uint64_t BYTES = 40'000;  // beyond what travels eagerly
constexpr uint64_t TAG_SIGNATURE = uint64_t{9} << 56;

// Receives one message from rank 1 that never comes.
sennit_op* post_receive(sennit_comm* comm, std::vector<std::byte>& memory, uint64_t timeout_us, uint32_t flags = 0) {
  PlanWriter writer(2, 0, 1, uint64_t{4} << 56);
  writer.add(StepKind::receive, 1, 0, 0, 0, memory.size());
  const LoadedPlan plan(writer.bytes());
  const sennit_buffer buffer{memory.data(), memory.size()};
  const sennit_post_options options{timeout_us, flags, 0, 1.0, nullptr, 0, 0};
  sennit_op* op = nullptr;
  REQUIRE(sennit_post(comm, plan.handle, &buffer, 1, &options, &op, nullptr, 0) == SENNIT_OK);
  return op;
}

// The message that post_receive waits for.
void send_to_rank_0(sennit_comm* comm, std::vector<std::byte> data) {
  PlanWriter writer(2, 1, 1, uint64_t{4} << 56);
  writer.add(StepKind::send, 0, 0, 0, 0, data.size(), {Operand{}});
  const LoadedPlan plan(writer.bytes());
  const sennit_buffer buffer{data.data(), data.size()};
  const sennit_post_options options{0, 0, 0, 1.0, nullptr, 0, 0};
  sennit_op* op = nullptr;
  REQUIRE(sennit_post(comm, plan.handle, &buffer, 1, &options, &op, nullptr, 0) == SENNIT_OK);
  CHECK(sennit_wait(op, 0) == SENNIT_OK);
  sennit_op_release(op);
}

// Rank 0 of two over a fake device, with a receive in flight whose message never comes. A device places packets on its
// own, and a copy of one may come at any time. Once an operation has ended, its memory may be anything.
class DeviceRank {
 public:
  // `timeout_us` of the receive; 0: long.
  DeviceRank(bool has_windows, uint64_t timeout_us) : memory_(BYTES, std::byte{0x11}) {
    fake.has_windows = has_windows;
    VerbsConfig config;
    config.addresses = {"fd00::1"};
    config.path_count = 2;
    config.library = &fake.library();
    peer_ = std::make_unique<VerbsPort>(1, 2, config);  // only its address is needed
    engine_ = new Engine({0, 2, 20'000'000, 0, 2});
    const std::vector<std::byte> for_all = engine_->ports().verbs_open(config);
    offer_ = RoceOffer::decode(test::joined(for_all, engine_->ports().offer_for(1)));
    // From here on only the engine uses the device, until the engine has been shut down.
    engine_->connect({{Route::Kind::self, {}}, {Route::Kind::verbs, test::info_of(*peer_, 0)}});
    op = post_receive(comm(), memory_, timeout_us);
  }
  ~DeviceRank() {
    sennit_op_release(op);
    sennit_shutdown(comm(), 0);
    engine_->release();
  }
  DeviceRank(const DeviceRank&) = delete;

  sennit_comm* comm() const { return reinterpret_cast<sennit_comm*>(engine_); }
  const std::vector<uint32_t>& queue_pairs() const { return offer_.for_reader.qpns; }
  void wait_for(const std::string& name, uint64_t count) const {
    const uint64_t deadline_us = clock_us() + 20'000'000;
    while (counter(name) < count) {
      REQUIRE_MESSAGE(clock_us() < deadline_us, name);
      std::this_thread::yield();
    }
  }
  // Under every key that was ever open, over every queue pair that leads here.
  bool is_reached_by_late_writes() {
    REQUIRE_FALSE(fake.opened_keys.empty());
    for (const uint32_t key : fake.opened_keys) {
      for (const uint32_t qpn : queue_pairs()) {
        fake.arrive({0, qpn, IBV_WR_RDMA_WRITE_WITH_IMM, htonl(1), reinterpret_cast<uint64_t>(memory_.data()), key,
                     std::vector<std::byte>(1'024, std::byte{0xFF})});
      }
    }
    return std::any_of(memory_.begin(), memory_.end(), [](std::byte byte) { return byte != std::byte{0x11}; });
  }

  FakeVerbs fake;
  sennit_op* op = nullptr;

 private:
  uint64_t counter(const std::string& name) const {
    for (const auto& [known, value] : engine_->counters())
      if (known == name) return value;
    FAIL("no counter " << name);
    return 0;
  }

  std::vector<std::byte> memory_;
  std::unique_ptr<VerbsPort> peer_;
  Engine* engine_;
  RoceOffer offer_;
};

}  // namespace

TEST_CASE("a callback that throws harms neither the process nor other operations") {
  test::run_ranks(2, 20'000'000, [&](Engine& engine, uint32_t rank) {
    constexpr size_t COUNT = 10'000, OPERATIONS = 6;
    LoadedPlan plan(PlanWriter::allreduce(2, rank, COUNT * 4));
    std::vector<std::vector<float>> in(OPERATIONS, std::vector<float>(COUNT, 1)), out = in;
    std::atomic<uint32_t> called{0};
    std::vector<sennit_op*> operations;
    for (size_t i = 0; i < OPERATIONS; ++i) {
      const sennit_buffer buffers[] = {{in[i].data(), COUNT * 4}, {out[i].data(), COUNT * 4}};
      const sennit_post_options options{0, i % 2 == 0 ? uint32_t{SENNIT_POST_ASYNC} : 0u, 0, 1.0, nullptr, 0, 0};
      sennit_op* op = nullptr;
      REQUIRE(sennit_post(reinterpret_cast<sennit_comm*>(&engine), plan.handle, buffers, 2, &options, &op, nullptr,
                          0) == SENNIT_OK);
      const auto throws = [](void* counter) {
        static_cast<std::atomic<uint32_t>*>(counter)->fetch_add(1);
        throw std::runtime_error("a callback of the user");
      };
      CHECK(sennit_op_on_done(op, throws, &called) == SENNIT_OK);
      operations.push_back(op);
    }
    for (sennit_op* op : operations) {
      CHECK(sennit_wait(op, 0) == SENNIT_OK);
      sennit_op_release(op);
    }
    while (called != OPERATIONS) std::this_thread::yield();
  });
}

TEST_CASE("threads that shut a group down at the same time all return when its callbacks have") {
  Group group(2, 20'000'000);
  std::vector<std::byte> memory(BYTES);
  sennit_op* const op = post_receive(group.comm(0), memory, 0, SENNIT_POST_ASYNC);
  // All callers wait for its end.
  struct Hold {
    std::atomic<bool> is_held{false}, is_released{false};
  } hold;
  const auto wait_for_release = [](void* argument) {
    auto& shared = *static_cast<Hold*>(argument);
    shared.is_held = true;
    while (!shared.is_released) std::this_thread::yield();
  };
  REQUIRE(sennit_op_on_done(op, wait_for_release, &hold) == SENNIT_OK);
  send_to_rank_0(group.comm(1), std::vector<std::byte>(BYTES));
  while (!hold.is_held) std::this_thread::yield();

  constexpr uint32_t THREADS = 4;
  std::atomic<uint32_t> entered{0}, returned{0};
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < THREADS; ++i)
    threads.emplace_back([&] {
      ++entered;
      // Calls the engine itself, because the C interface lets no exception out.
      CHECK_NOTHROW(group.engines[0]->shutdown(20'000'000));
      ++returned;
    });
  while (entered != THREADS) std::this_thread::yield();
  // Far less than they wait for at most. A turn takes milliseconds where others are busy.
  const auto enough = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  for (int turn = 0; turn < 10'000 && std::chrono::steady_clock::now() < enough; ++turn) std::this_thread::yield();
  CHECK(returned == 0);
  hold.is_released = true;
  for (std::thread& thread : threads) thread.join();
  sennit_op_release(op);
}

TEST_CASE("a child of fork gets errors, and its end leaves the parent's group as it was") {
  Group group(2, 20'000'000);
  std::vector<std::byte> memory(BYTES);
  sennit_op* const op = post_receive(group.comm(0), memory, 0, SENNIT_POST_ASYNC);
  CHECK_FALSE(sennit_comm_is_inherited(group.comm(0)));
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // The child does not use doctest, which belongs to the parent. Its exit number says what was wrong.
    char error[256] = "";
    const sennit_buffer buffer{memory.data(), memory.size()};
    const sennit_post_options options{0, 0, 0, 1.0, nullptr, 0, 0};
    PlanWriter writer(2, 0, 1, uint64_t{4} << 56);
    writer.add(StepKind::receive, 1, 0, 0, 0, memory.size());
    const std::vector<std::byte> bytes = writer.bytes();
    sennit_plan* const plan = sennit_plan_load(bytes.data(), bytes.size(), error, sizeof error);
    sennit_op* posted = nullptr;
    const auto fails = [&]() -> int {
      if (!sennit_comm_is_inherited(group.comm(0))) return 1;
      if (sennit_post(group.comm(0), plan, &buffer, 1, &options, &posted, error, sizeof error) != SENNIT_ARGUMENT)
        return 2;
      if (posted != nullptr || std::string(error).find("forked") == std::string::npos) return 3;
      if (sennit_wait(op, 0) != SENNIT_ARGUMENT || sennit_op_status(op) != SENNIT_ARGUMENT) return 4;
      if (std::string(sennit_op_error(op)).find("forked") == std::string::npos) return 5;
      if (sennit_op_on_done(
              op, [](void*) {}, nullptr) != SENNIT_ARGUMENT)
        return 6;
      return 0;
    };
    const int wrong = fails();
    sennit_op_release(op);
    sennit_abort(group.comm(0), "a child");
    sennit_shutdown(group.comm(0), 10'000'000);
    sennit_comm_release(group.comm(0));
    _exit(wrong);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);

  const std::vector<std::byte> data(BYTES, std::byte{7});
  send_to_rank_0(group.comm(1), data);
  CHECK(sennit_wait(op, 0) == SENNIT_OK);
  CHECK(memory == data);
  sennit_op_release(op);
}

TEST_CASE("however a group ends, a device's late write finds no memory of its operations open") {
  enum class End { shutdown, abort, deadline };
  for (const bool has_windows : {true, false}) {
    for (const bool is_stuck : {false, true}) {
      for (const End end : {End::shutdown, End::abort, End::deadline}) {
        CAPTURE(has_windows);
        CAPTURE(is_stuck);
        CAPTURE(static_cast<int>(end));
        DeviceRank rank(has_windows, end == End::deadline ? 50'000 : 0);
        if (end == End::deadline) CHECK(sennit_wait(rank.op, 0) == SENNIT_TIMEOUT);
        rank.fake.binds_are_slow = is_stuck;
        if (end == End::abort) sennit_abort(rank.comm(), "enough");
        sennit_shutdown(rank.comm(), 0);
        CHECK(sennit_op_status(rank.op) != SENNIT_PENDING);
        CHECK_FALSE(rank.is_reached_by_late_writes());
      }
    }
  }
}

TEST_CASE("memory that is refused while a group ends leaves no key open either") {
  const test::Spared spared;
  for (const bool has_windows : {true, false}) {
    bool has_fired = true;
    for (uint64_t n = 0; has_fired; ++n) {
      CAPTURE(has_windows);
      CAPTURE(n);
      DeviceRank rank(has_windows, 0);
      {
        const test::FaultAt fault(test::Scarce::memory, n);
        const test::Exposed scope;
        sennit_shutdown(rank.comm(), 0);
        has_fired = fault.has_fired();
      }
      CHECK(sennit_op_status(rank.op) != SENNIT_PENDING);
      CHECK_FALSE(rank.is_reached_by_late_writes());
    }
  }
}

TEST_CASE("a port that comes up again after the end of a group revives nothing that the end cut off") {
  DeviceRank rank(true, 0);
  rank.fake.raise(IBV_EVENT_PORT_ERR);
  rank.wait_for("port_events", 1);
  for (const uint32_t qpn : rank.queue_pairs()) rank.fake.break_queue_pair(qpn);
  rank.wait_for("path_errors", rank.queue_pairs().size());
  rank.fake.binds_are_slow = true;
  sennit_abort(rank.comm(), "enough");
  // The engine's thread continues after an abort.
  rank.fake.raise(IBV_EVENT_PORT_ACTIVE);
  rank.wait_for("port_events", 2);
  sennit_shutdown(rank.comm(), 0);
  CHECK_FALSE(rank.is_reached_by_late_writes());
}

TEST_CASE("a message that is needed overtakes any number of unexpected ones, of its sender or another") {
  constexpr uint32_t SMALL = 8'000, FLOOD = 3'000;  // 24 MB
  test::run_ranks(3, 60'000'000, [&](Engine& engine, uint32_t rank) {
    auto* const comm = reinterpret_cast<sennit_comm*>(&engine);
    std::vector<std::byte> memory(SMALL, static_cast<std::byte>(rank));
    const auto transfer = [&](StepKind kind, uint32_t peer, uint32_t tag) {
      PlanWriter writer(3, rank, 1, TAG_SIGNATURE);
      if (kind == StepKind::send) {
        writer.add(kind, peer, 0, 0, 0, SMALL, {Operand{}});
      } else {
        writer.add(kind, peer, 0, 0, 0, SMALL);
      }
      const LoadedPlan plan(writer.bytes());
      const sennit_buffer buffer{memory.data(), SMALL};
      const sennit_post_options options{0, SENNIT_POST_P2P, tag, 1.0, nullptr, 0, 0};
      sennit_op* op = nullptr;
      const sennit_status posted = sennit_post(comm, plan.handle, &buffer, 1, &options, &op, nullptr, 0);
      if (posted != SENNIT_OK) return posted;
      const sennit_status status = sennit_wait(op, 0);
      sennit_op_release(op);
      return status;
    };
    if (rank == 0) {
      for (const uint32_t peer : {1u, 2u}) {
        REQUIRE(transfer(StepKind::receive, peer, 2) == SENNIT_OK);
        CHECK(memory.front() == static_cast<std::byte>(peer));
      }
    } else {
      for (uint32_t i = 0; i < FLOOD; ++i) REQUIRE(transfer(StepKind::send, 0, 1) == SENNIT_OK);
      CHECK(transfer(StepKind::send, 0, 2) == SENNIT_OK);
    }
  });
}

TEST_CASE("what was not sent when the peer aborts or leaves never ends well, over any port") {
  constexpr uint32_t SMALL = 8'000, COUNT = 3'000;  // more than the peer keeps
  for (const Route::Kind kind : {Route::Kind::shm, Route::Kind::udp}) {
    for (const bool aborts : {true, false}) {
      CAPTURE(aborts);
      CAPTURE(static_cast<int>(kind));
      const Group group(2, 20'000'000, kind);
      std::vector<std::byte> memory(BYTES);
      const auto post_send = [&](uint64_t size_bytes, uint32_t tag) {
        PlanWriter writer(2, 0, 1, TAG_SIGNATURE);
        writer.add(StepKind::send, 1, 0, 0, 0, size_bytes, {Operand{}});
        const LoadedPlan plan(writer.bytes());
        const sennit_buffer buffer{memory.data(), memory.size()};
        const sennit_post_options options{0, SENNIT_POST_P2P, tag, 1.0, nullptr, 0, 0};
        sennit_op* op = nullptr;
        sennit_post(group.comm(0), plan.handle, &buffer, 1, &options, &op, nullptr, 0);
        return op;
      };
      std::vector<sennit_op*> sends{post_send(BYTES, 1)};
      for (uint32_t i = 0; i < COUNT; ++i) sends.push_back(post_send(SMALL, 2));
      const auto sent = [&] {
        return std::count_if(sends.begin(), sends.end(), [](auto* op) { return sennit_op_status(op) == SENNIT_OK; });
      };
      REQUIRE(sent() < COUNT);
      if (aborts) {
        sennit_abort(group.comm(1), "a test");
      } else {
        sennit_shutdown(group.comm(1), 0);
      }
      // The peer reads nothing any more. What this rank finds room for until it hears of that does not count.
      CHECK(sennit_wait(sends.back(), 0) == SENNIT_PEER);
      CHECK(sennit_wait(sends.front(), 0) == SENNIT_PEER);
      const auto after = sent();
      CHECK(after < COUNT);
      CHECK(post_send(SMALL, 3) == nullptr);
      CHECK(sent() == after);
      for (sennit_op* op : sends) sennit_op_release(op);
    }
  }
}

TEST_CASE("an operation that is posted after the peer has aborted is refused, also where its message has come") {
  constexpr uint64_t SMALL = 512;  // travels at once
  for (const bool is_first_posted : {true, false}) {
    CAPTURE(is_first_posted);
    const Group group(2, 20'000'000);
    std::vector<std::byte> memory(SMALL), later(SMALL);
    sennit_op* const first = is_first_posted ? post_receive(group.comm(0), memory, 0) : nullptr;
    for (int i = 0; i < 2; ++i) send_to_rank_0(group.comm(1), std::vector<std::byte>(SMALL, std::byte{7}));
    sennit_abort(group.comm(1), "a test");
    PlanWriter writer(2, 0, 1, uint64_t{4} << 56);
    writer.add(StepKind::receive, 1, 0, 0, 0, later.size());
    const LoadedPlan plan(writer.bytes());
    const sennit_buffer buffer{later.data(), later.size()};
    const sennit_post_options options{0, 0, 0, 1.0, nullptr, 0, 0};
    sennit_op* second = nullptr;
    char error[256] = "";
    CHECK(sennit_post(group.comm(0), plan.handle, &buffer, 1, &options, &second, error, sizeof error) == SENNIT_PEER);
    CHECK(second == nullptr);
    CHECK(std::string(error).find("a test") != std::string::npos);
    if (first != nullptr) {
      // It was posted in time, and its message was sent before the end.
      CHECK(sennit_op_status(first) == SENNIT_OK);
      CHECK(memory == std::vector<std::byte>(SMALL, std::byte{7}));
      sennit_op_release(first);
    }
  }
}
