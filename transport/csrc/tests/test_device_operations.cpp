// SPDX-License-Identifier: Apache-2.0
// Operations on device memory: a fake device whose copies run when the test says so.
#include <doctest/doctest.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "tests/engine_group.hpp"

using namespace sennit;
using test::LoadedPlan;
using test::PlanWriter;

namespace {

constexpr uint64_t ALLTOALL = uint64_t{8} << 56;
constexpr uint64_t P2P = uint64_t{9} << 56;

// Two ranks swap `size_bytes`: each rank's buffer 0 goes to the other's buffer 1.
std::vector<std::byte> swap_plan(uint32_t rank, uint64_t size_bytes, bool on_device) {
  const uint32_t peer = 1 - rank, scratch = 2;
  PlanWriter plan(2, rank, 2, ALLTOALL | (on_device ? uint64_t{1} << 47 : 0));
  if (!on_device) {
    plan.add(StepKind::send, peer, 0, 0, 0, size_bytes, {Operand{}});
    plan.add(StepKind::receive, peer, 0, 1, 0, size_bytes);
    return plan.bytes();
  }
  plan.uses_device(2 * size_bytes);
  const uint32_t load = plan.add(StepKind::copy, 0, 0, scratch, 0, size_bytes, {Operand{}});
  plan.edge(load, plan.add(StepKind::send, peer, 0, 0, 0, size_bytes, {{.index = scratch}}));
  const uint32_t receive = plan.add(StepKind::receive, peer, 0, scratch, size_bytes, size_bytes);
  plan.edge(receive, plan.add(StepKind::copy, 0, 0, 1, 0, size_bytes, {{.index = scratch, .offset = size_bytes}}));
  return plan.bytes();
}

// Two ranks add `chunks` chunks of buffer 0 into buffer 1. Each chunk of the peer comes as a loan.
constexpr uint64_t CHUNK_BYTES = MAX_LOAN_BYTES;
std::vector<std::byte> sum_plan(uint32_t rank, uint32_t chunks, bool on_device) {
  const uint32_t peer = 1 - rank, scratch = 2, input = on_device ? scratch : 0;
  const uint64_t total_bytes = chunks * CHUNK_BYTES;
  PlanWriter plan(2, rank, 2, uint64_t{1} << 56 | uint64_t{SENNIT_F32} << 48 | total_bytes / 4);
  if (on_device) plan.uses_device(2 * total_bytes);
  for (uint32_t slot = 0; slot < chunks; ++slot) {
    const uint64_t at = slot * CHUNK_BYTES;
    const Operand own{.index = input, .offset = at};
    const uint32_t load = on_device ? plan.add(StepKind::copy, 0, 0, scratch, at, CHUNK_BYTES, {{.offset = at}}) : 0;
    const uint32_t send = plan.add(StepKind::send, peer, slot, 0, 0, CHUNK_BYTES, {own});
    const uint32_t receive = plan.add(StepKind::receive, peer, slot, 0, 0, CHUNK_BYTES, {}, STEP_LOAN);
    std::vector<Operand> both{own, {.kind = 1, .index = receive}};
    if (rank == 1) std::swap(both[0], both[1]);
    both[1].combinations = 1;
    const uint64_t result = on_device ? total_bytes + at : at;
    const uint32_t fold = plan.add(StepKind::reduce, 0, 0, on_device ? scratch : 1, result, CHUNK_BYTES, both);
    plan.edge(receive, fold);
    if (!on_device) continue;
    plan.edge(load, send);
    plan.edge(load, fold);
    plan.edge(fold, plan.add(StepKind::copy, 0, 0, 1, at, CHUNK_BYTES, {{.index = scratch, .offset = result}}));
  }
  return plan.bytes();
}

// The device memory of one call, as its owner holds it. Copies keep it alive beyond the operation.
class FakeCall : public std::enable_shared_from_this<FakeCall> {
 public:
  explicit FakeCall(std::vector<std::vector<std::byte>> buffers) : buffers_(std::move(buffers)) {}

  sennit_device handle() {
    held_ = shared_from_this();
    return {this, &start, &scratch, &ended};
  }

  // How many copies were asked for and not run yet.
  size_t queued() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return requests_.size();
  }
  // Runs the oldest copy; false if there is none.
  bool run_one(const char* error = nullptr) {
    Request request;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (requests_.empty()) return false;
      request = requests_.front();
      requests_.pop_front();
    }
    if (error == nullptr) std::memcpy(at(request.to), at(request.from), request.size_bytes);
    sennit_copy_done(request.op, request.step, error);
    sennit_op_release(request.op);
    return true;
  }
  std::vector<std::byte>& buffer(size_t index) { return buffers_[index]; }
  bool has_scratch() const { return has_scratch_; }
  uint32_t ended_count() const { return ended_count_; }
  void refuse_scratch() { refuses_scratch_ = true; }
  void refuse_copies() { refuses_copies_ = true; }

 private:
  struct Request {
    sennit_op* op = nullptr;
    uint32_t step = 0;
    sennit_place from{}, to{};
    uint64_t size_bytes = 0;
  };

  std::byte* at(const sennit_place& place) {
    return place.host != nullptr ? static_cast<std::byte*>(place.host) : buffers_[place.buffer].data() + place.offset;
  }
  static int start(void* context, sennit_op* op, uint32_t step, const sennit_place* from, const sennit_place* to,
                   uint64_t size_bytes) {
    auto* self = static_cast<FakeCall*>(context);
    if (self->refuses_copies_) return 1;
    sennit_op_retain(op);
    const std::lock_guard<std::mutex> lock(self->mutex_);
    self->requests_.push_back({op, step, *from, *to, size_bytes});
    return 0;
  }
  static void* scratch(void* context, uint64_t size_bytes) {
    auto* self = static_cast<FakeCall*>(context);
    if (self->refuses_scratch_) return nullptr;
    self->scratch_.resize(size_bytes);
    self->has_scratch_ = true;
    return self->scratch_.data();
  }
  static void ended(void* context) {
    auto* self = static_cast<FakeCall*>(context);
    ++self->ended_count_;
    const auto last = std::move(self->held_);
  }

  std::vector<std::vector<std::byte>> buffers_;
  std::vector<std::byte> scratch_;
  std::atomic<bool> has_scratch_{false}, refuses_scratch_{false}, refuses_copies_{false};
  std::atomic<uint32_t> ended_count_{0};
  std::mutex mutex_;
  std::deque<Request> requests_;
  std::shared_ptr<FakeCall> held_;  // by the core
};

std::vector<std::byte> pattern(size_t size_bytes, unsigned seed) {
  std::vector<std::byte> bytes(size_bytes);
  for (size_t i = 0; i < size_bytes; ++i) bytes[i] = static_cast<std::byte>((i * 7 + seed) & 0xFF);
  return bytes;
}

std::shared_ptr<FakeCall> swap_call(uint32_t rank, size_t size_bytes) {
  return std::make_shared<FakeCall>(
      std::vector<std::vector<std::byte>>{pattern(size_bytes, rank), std::vector<std::byte>(size_bytes)});
}

struct Posted {
  sennit_op* op = nullptr;
  sennit_status status = SENNIT_PENDING;
  std::string error;

  ~Posted() {
    if (op != nullptr) sennit_op_release(op);
  }
  void wait(uint64_t timeout_us = 0) {
    status = sennit_wait(op, timeout_us);
    error = sennit_op_error(op);
  }
};

constexpr uint64_t TIMEOUT_US = 20'000'000;

sennit_comm* comm(Engine& engine) { return reinterpret_cast<sennit_comm*>(&engine); }

std::unique_ptr<Posted> post(Engine& engine, const LoadedPlan& plan, FakeCall& call,
                             sennit_post_options options = {TIMEOUT_US, SENNIT_POST_ASYNC, 0, 1.0, nullptr, 0, 0}) {
  auto posted = std::make_unique<Posted>();
  char error[512] = "";
  const sennit_device device = call.handle();
  const sennit_status status =
      sennit_post_on_device(comm(engine), plan.handle, &device, &options, &posted->op, error, sizeof error);
  REQUIRE_MESSAGE(status == SENNIT_OK, error);
  return posted;
}

// Two ranks in one process over shared memory. Both are driven by their background threads.
struct Pair : test::Group {
  Pair() : Group(2, TIMEOUT_US) {}
  Engine& operator[](uint32_t rank) const { return *engines[rank]; }
};

// Yields until `done`, at most 20 s.
void expect(const std::function<bool()>& done) {
  const uint64_t deadline_us = clock_us() + TIMEOUT_US;
  while (!done() && clock_us() < deadline_us) std::this_thread::yield();
  REQUIRE(done());
}

}  // namespace

TEST_CASE("device memory is copied in, exchanged and copied out") {
  Pair ranks;
  for (const size_t size_bytes : {size_t{1}, size_t{5'000}, size_t{3'000'000}}) {
    std::vector<std::shared_ptr<FakeCall>> calls;
    std::vector<std::unique_ptr<LoadedPlan>> plans;
    std::vector<std::unique_ptr<Posted>> posted;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      calls.push_back(swap_call(rank, size_bytes));
      plans.push_back(std::make_unique<LoadedPlan>(swap_plan(rank, size_bytes, true)));
      posted.push_back(post(ranks[rank], *plans[rank], *calls[rank]));
    }
    expect([&] {
      for (const auto& call : calls) call->run_one();
      return sennit_op_status(posted[0]->op) != SENNIT_PENDING && sennit_op_status(posted[1]->op) != SENNIT_PENDING;
    });
    for (uint32_t rank = 0; rank < 2; ++rank) {
      posted[rank]->wait();
      CHECK_MESSAGE(posted[rank]->status == SENNIT_OK, posted[rank]->error);
      CHECK((calls[rank]->buffer(1) == pattern(size_bytes, 1 - rank)));
      expect([&] { return calls[rank]->ended_count() == 1; });
    }
  }
}

TEST_CASE("a host operation keeps its number behind a device operation, and need not wait for its copies") {
  Pair ranks;
  constexpr size_t LARGE = 3'000'000;
  std::vector<std::shared_ptr<FakeCall>> calls;
  std::vector<std::unique_ptr<LoadedPlan>> device_plans, host_plans;
  std::vector<std::unique_ptr<Posted>> device_posted, host_posted;
  std::vector<std::vector<std::byte>> in, out;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    calls.push_back(swap_call(rank, LARGE));
    device_plans.push_back(std::make_unique<LoadedPlan>(swap_plan(rank, LARGE, true)));
    host_plans.push_back(std::make_unique<LoadedPlan>(swap_plan(rank, LARGE, false)));
    in.push_back(pattern(LARGE, rank + 50));
    out.emplace_back(LARGE);
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    device_posted.push_back(post(ranks[rank], *device_plans[rank], *calls[rank]));
    const sennit_buffer buffers[] = {{in[rank].data(), LARGE}, {out[rank].data(), LARGE}};
    const sennit_post_options options{TIMEOUT_US, SENNIT_POST_ASYNC, 0, 1.0, nullptr, 0, 0};
    host_posted.push_back(std::make_unique<Posted>());
    REQUIRE(sennit_post(comm(ranks[rank]), host_plans[rank]->handle, buffers, 2, &options, &host_posted[rank]->op,
                        nullptr, 0) == SENNIT_OK);
    CHECK(sennit_op_sequence(device_posted[rank]->op) == 1);
    CHECK(sennit_op_sequence(host_posted[rank]->op) == 2);
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    host_posted[rank]->wait();
    CHECK_MESSAGE(host_posted[rank]->status == SENNIT_OK, host_posted[rank]->error);
    CHECK((out[rank] == pattern(LARGE, 51 - rank)));
    CHECK(sennit_op_status(device_posted[rank]->op) == SENNIT_PENDING);
  }
  expect([&] {
    for (const auto& call : calls) call->run_one();
    return sennit_op_status(device_posted[0]->op) == SENNIT_OK && sennit_op_status(device_posted[1]->op) == SENNIT_OK;
  });
}

TEST_CASE("a few device operations of a group run at a time, in its order") {
  Pair ranks;
  constexpr size_t SIZE = 1'000, CALLS = 9;
  std::vector<std::vector<std::shared_ptr<FakeCall>>> calls(2);
  std::vector<std::vector<std::unique_ptr<Posted>>> posted(2);
  std::vector<std::unique_ptr<LoadedPlan>> plans;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    plans.push_back(std::make_unique<LoadedPlan>(swap_plan(rank, SIZE, true)));
    for (size_t i = 0; i < CALLS; ++i) {
      calls[rank].push_back(swap_call(rank + 10 * static_cast<uint32_t>(i), SIZE));
      posted[rank].push_back(post(ranks[rank], *plans[rank], *calls[rank].back()));
    }
    const auto held =
        std::count_if(calls[rank].begin(), calls[rank].end(), [](const auto& call) { return call->has_scratch(); });
    CHECK(held == 4);
    CHECK(calls[rank][3]->has_scratch());
  }
  // The copies of the last operation end first.
  expect([&] {
    for (auto& of_rank : calls) {
      for (auto call = of_rank.rbegin(); call != of_rank.rend(); ++call) (*call)->run_one();
    }
    return sennit_op_status(posted[0].back()->op) == SENNIT_OK && sennit_op_status(posted[1].back()->op) == SENNIT_OK;
  });
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (size_t i = 0; i < CALLS; ++i) {
      posted[rank][i]->wait();
      CHECK_MESSAGE(posted[rank][i]->status == SENNIT_OK, posted[rank][i]->error);
      CHECK((calls[rank][i]->buffer(1) == pattern(SIZE, 1 - rank + 10 * static_cast<unsigned>(i))));
    }
  }
}

// Rank 0 posts a sum on host memory behind one on device memory that cannot begin yet. Rank 1 waits for the latter
// first. If the former took all loans, the latter would never have any.
TEST_CASE("a sum on host memory takes no loans before an older one on device memory") {
  Pair ranks;
  constexpr size_t SIZE = 1'000, RUNNING = 4;
  constexpr uint32_t CHUNKS = 6;  // more than a lane lends at a time
  constexpr size_t SUM_BYTES = CHUNKS * CHUNK_BYTES;
  std::vector<std::shared_ptr<FakeCall>> swaps[2];
  std::shared_ptr<FakeCall> sums[2];
  std::vector<std::unique_ptr<Posted>> posted[2], host_posted;
  std::vector<std::unique_ptr<LoadedPlan>> swap_plans, device_plans, host_plans;
  std::vector<float> in(SUM_BYTES / 4, 1.5f), out[2];
  for (uint32_t rank = 0; rank < 2; ++rank) {
    swap_plans.push_back(std::make_unique<LoadedPlan>(swap_plan(rank, SIZE, true)));
    device_plans.push_back(std::make_unique<LoadedPlan>(sum_plan(rank, CHUNKS, true)));
    host_plans.push_back(std::make_unique<LoadedPlan>(sum_plan(rank, CHUNKS, false)));
    for (size_t i = 0; i < RUNNING; ++i) {
      swaps[rank].push_back(swap_call(rank, SIZE));
      posted[rank].push_back(post(ranks[rank], *swap_plans[rank], *swaps[rank].back()));
    }
    std::vector<std::byte> values(SUM_BYTES);
    std::memcpy(values.data(), in.data(), SUM_BYTES);
    sums[rank] =
        std::make_shared<FakeCall>(std::vector<std::vector<std::byte>>{values, std::vector<std::byte>(SUM_BYTES)});
    posted[rank].push_back(post(ranks[rank], *device_plans[rank], *sums[rank]));
    out[rank].resize(SUM_BYTES / 4);
  }
  const auto post_host = [&](uint32_t rank) {
    const sennit_buffer buffers[] = {{in.data(), SUM_BYTES}, {out[rank].data(), SUM_BYTES}};
    const sennit_post_options options{TIMEOUT_US, SENNIT_POST_ASYNC, 0, 1.0, nullptr, 0, 0};
    host_posted.push_back(std::make_unique<Posted>());
    char error[256] = "";
    REQUIRE_MESSAGE(sennit_post(comm(ranks[rank]), host_plans[rank]->handle, buffers, 2, &options,
                                &host_posted.back()->op, error, sizeof error) == SENNIT_OK,
                    error);
  };
  post_host(0);
  CHECK_FALSE(sums[0]->has_scratch());
  expect([&] {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      for (const auto& call : swaps[rank]) call->run_one();
      sums[rank]->run_one();
    }
    return sennit_op_status(posted[0].back()->op) != SENNIT_PENDING &&
           sennit_op_status(posted[1].back()->op) != SENNIT_PENDING;
  });
  post_host(1);
  for (const auto& one : host_posted) {
    one->wait();
    CHECK_MESSAGE(one->status == SENNIT_OK, one->error);
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    for (const auto& one : posted[rank]) {
      one->wait();
      CHECK_MESSAGE(one->status == SENNIT_OK, one->error);
    }
    CHECK((out[rank] == std::vector<float>(SUM_BYTES / 4, 3.0f)));
    CHECK(std::memcmp(sums[rank]->buffer(1).data(), out[rank].data(), SUM_BYTES) == 0);
  }
}

TEST_CASE("after an abort queued copies touch nothing that was freed, and each operation ends once") {
  Pair ranks;
  constexpr size_t SIZE = 100'000, CALLS = 6;
  std::vector<std::shared_ptr<FakeCall>> calls;
  LoadedPlan plan(swap_plan(0, SIZE, true));
  {
    std::vector<std::unique_ptr<Posted>> posted;
    for (size_t i = 0; i < CALLS; ++i) {
      calls.push_back(swap_call(0, SIZE));
      posted.push_back(post(ranks[0], plan, *calls.back()));
    }
    CHECK(calls[0]->queued() == 1);
    sennit_abort(comm(ranks[0]), "a test");
    for (const auto& one : posted) {
      one->wait();
      CHECK(one->status == SENNIT_ABORTED);
    }
  }
  for (const auto& call : calls) {
    expect([&] { return call->ended_count() == 1; });
    // The device had begun the copy. It ends now, into memory that its owner kept, and the core ignores it.
    while (call->run_one()) {
    }
    CHECK(call->ended_count() == 1);
    CHECK((call->buffer(1) == std::vector<std::byte>(SIZE)));
  }
}

TEST_CASE("a copy that never ends: the deadline says what is waited for") {
  Pair ranks;
  auto call = swap_call(0, 1'000);
  LoadedPlan plan(swap_plan(0, 1'000, true));
  auto posted = post(ranks[0], plan, *call, {30'000, SENNIT_POST_ASYNC, 0, 1.0, nullptr, 0, 0});
  posted->wait();
  CHECK(posted->status == SENNIT_TIMEOUT);
  CHECK_MESSAGE(posted->error.find("1 copies between host and device") != std::string::npos, posted->error);
  while (call->run_one()) {
  }
}

TEST_CASE("what a device refuses fails the group on every rank") {
  for (const int what : {0, 1, 2}) {
    Pair ranks;
    std::vector<std::shared_ptr<FakeCall>> calls;
    std::vector<std::unique_ptr<LoadedPlan>> plans;
    std::vector<std::unique_ptr<Posted>> posted;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      calls.push_back(swap_call(rank, 1'000));
      plans.push_back(std::make_unique<LoadedPlan>(swap_plan(rank, 1'000, true)));
    }
    if (what == 0) calls[0]->refuse_scratch();
    if (what == 1) calls[0]->refuse_copies();
    // The rank that fails comes last: what is posted after that is refused.
    posted.resize(2);
    for (const uint32_t rank : {1u, 0u}) posted[rank] = post(ranks[rank], *plans[rank], *calls[rank]);
    if (what == 2) CHECK(calls[0]->run_one("the device fell off the bus"));
    for (uint32_t rank = 0; rank < 2; ++rank) posted[rank]->wait();
    CHECK(posted[0]->status == SENNIT_DEVICE);
    CHECK(posted[1]->status == SENNIT_PEER);
    const char* said = what == 0 ? "no host memory" : what == 1 ? "cannot be started" : "fell off the bus";
    CHECK_MESSAGE(posted[0]->error.find(said) != std::string::npos, posted[0]->error);
    CHECK_MESSAGE(posted[1]->error.find(said) != std::string::npos, posted[1]->error);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      expect([&] { return calls[rank]->ended_count() == 1; });
      while (calls[rank]->run_one()) {
      }
    }
  }
}

TEST_CASE("a host send does not overtake a device send of the same tag") {
  Pair ranks;
  constexpr size_t SIZE = 2'000;
  PlanWriter from_device(2, 0, 1, P2P), from_host(2, 0, 1, P2P), to_host(2, 1, 1, P2P);
  from_device.uses_device(SIZE);
  const uint32_t load = from_device.add(StepKind::copy, 0, 0, 1, 0, SIZE, {Operand{}});
  from_device.edge(load, from_device.add(StepKind::send, 1, 0, 0, 0, SIZE, {{.index = 1}}));
  from_host.add(StepKind::send, 1, 0, 0, 0, SIZE, {Operand{}});
  to_host.add(StepKind::receive, 0, 0, 0, 0, SIZE);
  LoadedPlan device_send(from_device.bytes()), host_send(from_host.bytes()), receive(to_host.bytes());
  auto call = std::make_shared<FakeCall>(std::vector<std::vector<std::byte>>{pattern(SIZE, 1)});
  const auto options = [](uint32_t tag) {
    return sennit_post_options{TIMEOUT_US, SENNIT_POST_ASYNC | SENNIT_POST_P2P, tag, 1.0, nullptr, 0, 0};
  };
  std::vector<std::vector<std::byte>> sent{pattern(SIZE, 2), pattern(SIZE, 3)}, got(3, std::vector<std::byte>(SIZE));
  std::vector<std::unique_ptr<Posted>> posted;
  posted.push_back(post(ranks[0], device_send, *call, options(7)));
  const auto post_host = [&](uint32_t rank, const LoadedPlan& plan, std::vector<std::byte>& data, uint32_t tag) {
    const sennit_buffer buffer{data.data(), SIZE};
    const sennit_post_options chosen = options(tag);
    posted.push_back(std::make_unique<Posted>());
    REQUIRE(sennit_post(comm(ranks[rank]), plan.handle, &buffer, 1, &chosen, &posted.back()->op, nullptr, 0) ==
            SENNIT_OK);
  };
  post_host(0, host_send, sent[0], 7);
  post_host(0, host_send, sent[1], 8);
  for (size_t i = 0; i < 3; ++i) post_host(1, receive, got[i], i == 2 ? 8 : 7);
  // A send with another tag passes.
  posted[5]->wait();
  CHECK(posted[5]->status == SENNIT_OK);
  CHECK((got[2] == sent[1]));
  CHECK(sennit_op_status(posted[1]->op) == SENNIT_PENDING);
  CHECK(call->run_one());
  for (const auto& one : posted) {
    one->wait();
    CHECK_MESSAGE(one->status == SENNIT_OK, one->error);
  }
  CHECK((got[0] == pattern(SIZE, 1)));
  CHECK((got[1] == sent[0]));
}

TEST_CASE("only copies touch device memory, and host and device plans are not mixed up") {
  const auto reason = [](const std::vector<std::byte>& bytes) {
    char error[256] = "";
    sennit_plan* plan = sennit_plan_load(bytes.data(), bytes.size(), error, sizeof error);
    if (plan != nullptr) sennit_plan_release(plan);
    return std::string(error);
  };
  const auto refused = [&](StepKind kind, uint64_t size_bytes, std::vector<Operand> operands) {
    PlanWriter plan(2, 0, 1, ALLTOALL);
    plan.uses_device(64).add(kind, 1, 0, 0, 0, size_bytes, std::move(operands));
    return reason(plan.bytes()).find("only a copy may") != std::string::npos;
  };
  CHECK(refused(StepKind::send, 8, {Operand{}}));
  CHECK(refused(StepKind::receive, 8, {}));
  CHECK(!refused(StepKind::send, 8, {{.index = 1}}));
  CHECK(!refused(StepKind::receive, 0, {}));

  Pair ranks;
  LoadedPlan host(swap_plan(0, 8, false)), device(swap_plan(0, 8, true));
  auto call = swap_call(0, 8);
  const sennit_post_options options{TIMEOUT_US, 0, 0, 1.0, nullptr, 0, 0};
  sennit_op* op = nullptr;
  const sennit_device handle = call->handle();
  CHECK(sennit_post_on_device(comm(ranks[0]), host.handle, &handle, &options, &op, nullptr, 0) == SENNIT_ARGUMENT);
  const sennit_buffer buffers[] = {{call->buffer(0).data(), 8}, {call->buffer(1).data(), 8}};
  CHECK(sennit_post(comm(ranks[0]), device.handle, buffers, 2, &options, &op, nullptr, 0) == SENNIT_ARGUMENT);
  CHECK(ranks[0].sequence() == 0);
  handle.ended(handle.context);
}
