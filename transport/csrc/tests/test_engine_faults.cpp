// SPDX-License-Identifier: Apache-2.0
// Refuses memory, threads and descriptors, one request after the other. Each refusal gives an error, and nothing stays
// active or leaks.
#include <doctest/doctest.h>

#include <atomic>
#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

#include "tests/engine_group.hpp"
#include "tests/fault_injection.hpp"

using namespace sennit;
using test::Exposed;
using test::FaultAt;
using test::Group;
using test::LoadedPlan;
using test::PlanWriter;
using test::Scarce;
using test::Spared;

namespace {

constexpr uint64_t COUNT = 20'000;  // floats: beyond what travels eagerly
constexpr uint64_t DEADLINE_US = 20'000'000;

size_t open_descriptors() {
  const std::filesystem::directory_iterator folder("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(folder), end(folder)));
}

// Runs `attempt` with the n-th request refused, for each n until no request is refused any more.
template <class Attempt>
void for_each_fault(Scarce what, Attempt attempt) {
  constexpr uint64_t MAX = 20'000;
  for (uint64_t n = 0; n < MAX; ++n) {
    CAPTURE(n);
    if (!attempt(what, n)) return;
  }
  FAIL("more than " << MAX << " requests");
}

struct Buffers {
  std::vector<float> in = std::vector<float>(COUNT, 1), out = std::vector<float>(COUNT);
  std::vector<sennit_buffer> list() { return {{in.data(), COUNT * 4}, {out.data(), COUNT * 4}}; }
};

// A call under test. Every other request of the test's threads succeeds.
const auto exposed = [](auto call) {
  const Exposed scope;
  return call();
};
const auto spared = [](auto call) { return call(); };

bool is_active(Engine& engine) { return engine.describe().find(", 0 in flight") == std::string::npos; }

// One operation from its post to its end. Whatever is refused, every call returns and reports the result. `exposed` or
// `spared` applies to the calls.
template <class Wrap>
sennit_status use(sennit_comm* comm, sennit_plan* plan, uint32_t flags, Wrap wrap) {
  Buffers buffers;  // gone when this returns: the sanitizer tells whether anything still uses it
  const std::vector<sennit_buffer> list = buffers.list();
  const sennit_post_options options{0, flags, 0, 1.0, nullptr, 0, 0};
  sennit_op* op = nullptr;
  char error[512] = "";
  const sennit_status posted =
      wrap([&] { return sennit_post(comm, plan, list.data(), 2, &options, &op, error, sizeof error); });
  CHECK((op != nullptr) == (posted == SENNIT_OK));
  CHECK((error[0] != '\0') == (posted != SENNIT_OK));
  if (op == nullptr) return posted;
  std::atomic<uint32_t> called{0};
  const auto count = [](void* counter) { ++*static_cast<std::atomic<uint32_t>*>(counter); };
  wrap([&] { return sennit_op_on_done(op, count, &called); });
  const sennit_status status = wrap([&] { return sennit_wait(op, 0); });
  CHECK(status != SENNIT_PENDING);
  CHECK((sennit_op_error(op)[0] != '\0') == (status != SENNIT_OK));
  while (called == 0) std::this_thread::yield();  // (another thread may have finished it)
  if (status == SENNIT_OK) CHECK((buffers.out == std::vector<float>(COUNT, 2)));
  sennit_op_release(op);
  return status;
}

// Two operations of two ranks, with one request refused during the first. False: no request was refused.
bool work_with_fault(Route::Kind kind, FaultAt::Where where, Scarce what, uint64_t n) {
  const Spared scope;
  Group group(2, DEADLINE_US, kind);
  Engine& engine = *group.engines[0];
  std::vector<sennit_status> theirs;
  std::thread peer([&] {
    const Spared peer_scope;
    LoadedPlan plan(PlanWriter::allreduce(2, 1, COUNT * 4));
    while (theirs.size() < 2 && (theirs.empty() || theirs.back() == SENNIT_OK))
      theirs.push_back(use(group.comm(1), plan.handle, 0, spared));
  });
  const std::vector<std::byte> bytes = PlanWriter::allreduce(2, 0, COUNT * 4);
  bool has_fired;
  uint32_t done = 0;
  {
    const FaultAt fault(what, n, where);
    char error[512] = "";
    sennit_plan* const plan =
        exposed([&] { return sennit_plan_load(bytes.data(), bytes.size(), error, sizeof error); });
    CHECK((plan != nullptr) == (error[0] == '\0'));
    if (plan != nullptr && use(group.comm(0), plan, SENNIT_POST_ASYNC, exposed) == SENNIT_OK) ++done;
    sennit_plan_release(plan);
    has_fired = fault.has_fired();
  }
  // Either nothing happened and the call can be repeated, or the group has ended and says why.
  const LoadedPlan plan(bytes);
  while (done < 2 && engine.failure().empty())
    if (use(group.comm(0), plan.handle, 0, spared) == SENNIT_OK) ++done;
  CHECK_FALSE(is_active(engine));
  if (!engine.failure().empty()) CHECK(use(group.comm(0), plan.handle, 0, spared) != SENNIT_OK);
  peer.join();
  for (const sennit_status status : theirs) CHECK(status != SENNIT_PENDING);
  if (done == 2) CHECK(theirs == std::vector<sennit_status>(2, SENNIT_OK));
  return has_fired;
}

// The end of a group with an operation in flight.
template <class End>
bool end_with_fault(Route::Kind kind, Scarce what, uint64_t n, End end) {
  const Spared scope;
  Group group(2, DEADLINE_US, kind);
  const LoadedPlan plan(PlanWriter::allreduce(2, 0, COUNT * 4));
  auto buffers = std::make_unique<Buffers>();
  const sennit_post_options options{0, SENNIT_POST_ASYNC, 0, 1.0, nullptr, 0, 0};
  sennit_op* op = nullptr;
  REQUIRE(sennit_post(group.comm(0), plan.handle, buffers->list().data(), 2, &options, &op, nullptr, 0) == SENNIT_OK);
  bool has_fired;
  {
    const FaultAt fault(what, n);
    exposed([&] {
      end(group.comm(0));
      return 0;
    });
    has_fired = fault.has_fired();
  }
  CHECK(sennit_op_status(op) != SENNIT_PENDING);
  CHECK(sennit_op_error(op)[0] != '\0');
  CHECK_FALSE(is_active(*group.engines[0]));
  buffers.reset();
  sennit_op_release(op);
  return has_fired;
}

}  // namespace

TEST_CASE("a group that cannot be made leaves nothing behind, whatever the system refused") {
  for (const Route::Kind kind : {Route::Kind::shm, Route::Kind::udp}) {
    for (const Scarce what : {Scarce::memory, Scarce::thread, Scarce::descriptor}) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(static_cast<int>(what));
      for_each_fault(what, [kind](Scarce scarce, uint64_t n) {
        const Spared scope;
        const size_t before = open_descriptors();
        bool has_fired;
        {
          const std::shared_ptr<Engine> peer(new Engine({1, 2, DEADLINE_US, 1, 2}), [](Engine* engine) {
            engine->shutdown(0);
            engine->release();
          });
          std::vector<std::vector<std::byte>> offers = {{}, Group::offer(*peer, kind)};
          if (kind == Route::Kind::udp) offers[1] = test::joined(offers[1], peer->ports().offer_for(0));
          const FaultAt fault(scarce, n);
          const std::vector<Route> routes = Group::routes(0, kind, offers);
          Engine* engine = nullptr;
          try {
            const Exposed scope;
            engine = new Engine({0, 2, DEADLINE_US, 0, 2, flow::FlowConfig{}.peer_timeout_us, 3});
            Group::offer(*engine, kind);
            if (kind != Route::Kind::shm || engine->ports().shm_accept(1, offers[1])) engine->connect(routes);
          } catch (const std::exception&) {
          }
          if (engine != nullptr) {
            engine->shutdown(0);
            engine->release();
          }
          has_fired = fault.has_fired();
        }
        CHECK(open_descriptors() == before);
        return has_fired;
      });
    }
  }
}

TEST_CASE(
    "a call that the system refuses something ends with an error, and the next call works or says that the group "
    "ended") {
  for (const Route::Kind kind : {Route::Kind::shm, Route::Kind::udp}) {
    for (const Scarce what : {Scarce::memory, Scarce::thread, Scarce::descriptor}) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(static_cast<int>(what));
      for_each_fault(what,
                     [&](Scarce scarce, uint64_t n) { return work_with_fault(kind, FaultAt::Where::here, scarce, n); });
    }
  }
}

TEST_CASE("memory that is refused to the background thread ends the group, not the process") {
  for (const Route::Kind kind : {Route::Kind::shm, Route::Kind::udp}) {
    CAPTURE(static_cast<int>(kind));
    for (uint64_t n = 0; n < 40; ++n) {
      CAPTURE(n);
      work_with_fault(kind, FaultAt::Where::elsewhere, Scarce::memory, n);
    }
  }
}

TEST_CASE("every operation ends, whatever the system refuses abort and shutdown") {
  for (const Route::Kind kind : {Route::Kind::shm, Route::Kind::udp}) {
    CAPTURE(static_cast<int>(kind));
    for_each_fault(Scarce::memory, [kind](Scarce what, uint64_t n) {
      return end_with_fault(kind, what, n,
                            [](sennit_comm* comm) { sennit_abort(comm, "the disk of the user is full"); });
    });
    for_each_fault(Scarce::memory, [kind](Scarce what, uint64_t n) {
      return end_with_fault(kind, what, n, [](sennit_comm* comm) { sennit_shutdown(comm, 0); });
    });
  }
}

TEST_CASE("without a thread an asynchronous post has no effect, and a callback waits until there is one") {
  const Spared scope;
  Group group(2, DEADLINE_US);
  const LoadedPlan plan(PlanWriter::allreduce(2, 0, COUNT * 4));
  Buffers buffers;
  const std::vector<sennit_buffer> list = buffers.list();
  sennit_op* op = nullptr;
  char error[256] = "";
  {
    const FaultAt fault(Scarce::thread, 0);
    const sennit_post_options options{0, SENNIT_POST_ASYNC, 0, 1.0, nullptr, 0, 0};
    CHECK(exposed([&] {
            return sennit_post(group.comm(0), plan.handle, list.data(), 2, &options, &op, error, sizeof error);
          }) == SENNIT_DEVICE);
    CHECK(fault.has_fired());
  }
  CHECK(op == nullptr);
  CHECK(std::string(error).find("temporarily unavailable") != std::string::npos);
  CHECK(sennit_comm_sequence(group.comm(0)) == 0);
  CHECK_FALSE(is_active(*group.engines[0]));

  const sennit_post_options options{0, 0, 0, 1.0, nullptr, 0, 0};
  REQUIRE(sennit_post(group.comm(0), plan.handle, list.data(), 2, &options, &op, nullptr, 0) == SENNIT_OK);
  std::atomic<bool> is_called{false};
  {
    const FaultAt fault(Scarce::thread, 0);
    const auto set = [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; };
    CHECK(exposed([&] { return sennit_op_on_done(op, set, &is_called); }) == SENNIT_DEVICE);
  }
  CHECK_FALSE(is_called);
  sennit_abort(group.comm(0), "enough");
  while (!is_called) std::this_thread::yield();
  sennit_op_release(op);
}
