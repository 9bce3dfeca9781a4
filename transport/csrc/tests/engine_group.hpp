// SPDX-License-Identifier: Apache-2.0
// Plans and groups for tests of the engine: the ranks are threads, or just engines, of one process.
#pragma once

#include <doctest/doctest.h>

#include <bit>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "executor/engine.hpp"
#include "executor/plan.hpp"
#include "tests/offers.hpp"

namespace sennit::test {

// Writes the binary form of docs/reference/plans.md, step by step.
class PlanWriter {
 public:
  PlanWriter(uint32_t world, uint32_t rank, uint16_t buffer_count, uint64_t signature)
      : world_(world), rank_(rank), buffer_count_(buffer_count), signature_(signature) {}
  // Of a plan that takes counts.
  PlanWriter& takes(uint32_t count_count, uint32_t unit_bytes) {
    count_count_ = count_count;
    unit_bytes_ = unit_bytes;
    return *this;
  }

  PlanWriter& uses_scratch(uint64_t scratch_bytes) {
    scratch_bytes_ = scratch_bytes;
    return *this;
  }

  // The caller's buffers are device memory.
  PlanWriter& uses_device(uint64_t scratch_bytes) {
    on_device_ = true;
    scratch_bytes_ = scratch_bytes;
    return *this;
  }

  uint32_t add(StepKind kind, uint32_t peer, uint32_t slot, uint32_t buffer, uint64_t offset, uint64_t size_bytes,
               std::vector<Operand> operands = {}, uint8_t flags = 0) {
    Step step{};
    step.kind = kind;
    step.dtype = SENNIT_F32;
    step.reduce = SENNIT_SUM;
    step.flags = flags;
    step.peer = peer;
    step.slot = slot;
    step.operand_first = static_cast<uint32_t>(operands_.size());
    step.operand_count = static_cast<uint32_t>(operands.size());
    step.destination_buffer = buffer;
    step.destination_offset = offset;
    step.size_bytes = size_bytes;
    operands_.insert(operands_.end(), operands.begin(), operands.end());
    steps_.push_back(step);
    edges_.emplace_back();
    return static_cast<uint32_t>(steps_.size() - 1);
  }
  Step& step(uint32_t number) { return steps_[number]; }
  void edge(uint32_t from, uint32_t to) { edges_[from].push_back(to); }

  std::vector<std::byte> bytes() const {
    std::vector<uint32_t> flat;
    std::vector<Step> steps = steps_;
    for (size_t i = 0; i < steps.size(); ++i) {
      steps[i].edge_first = static_cast<uint32_t>(flat.size());
      steps[i].edge_count = static_cast<uint32_t>(edges_[i].size());
      flat.insert(flat.end(), edges_[i].begin(), edges_[i].end());
    }
    std::vector<std::byte> out(64);
    auto put = [&](size_t at, auto value) { std::memcpy(out.data() + at, &value, sizeof value); };
    put(0, uint32_t{0x31504E53});
    put(4, uint16_t{2});
    put(6, buffer_count_);
    put(8, world_);
    put(12, rank_);
    put(16, signature_);
    put(24, static_cast<uint32_t>(steps.size()));
    put(28, static_cast<uint32_t>(operands_.size()));
    put(32, static_cast<uint32_t>(flat.size()));
    put(40, scratch_bytes_);
    put(48, uint32_t{on_device_ ? 1u : 0u});
    put(52, count_count_);
    put(56, world_);
    put(60, unit_bytes_);
    auto append = [&](const auto& records) {
      const auto* begin = reinterpret_cast<const std::byte*>(records.data());
      out.insert(out.end(), begin, begin + records.size() * sizeof(records[0]));
    };
    append(steps);
    append(operands_);
    append(flat);
    return out;
  }

  static uint64_t counted(uint64_t first, uint64_t end) { return CountRange::BIT | end << 32 | first; }

  // As transport/algorithms/alltoall.py: the counts that go to each rank, then those that come.
  static std::vector<std::byte> alltoall(uint32_t world, uint32_t rank, uint32_t unit_bytes) {
    PlanWriter writer(world, rank, 2, uint64_t{SENNIT_ALLTOALL} << 56);
    writer.takes(2 * world, unit_bytes);
    const auto sent = [](uint32_t part) { return Operand{.offset = counted(0, part)}; };
    for (uint32_t i = 1; i < world; ++i) {
      const uint32_t peer = (rank + i) % world;
      writer.add(StepKind::send, peer, 0, 0, 0, counted(peer, peer + 1), {sent(peer)});
    }
    for (uint32_t i = 0; i < world; ++i) {
      const uint32_t peer = (rank + world - i) % world, part = world + peer;
      const uint64_t offset = counted(world, part), size = counted(part, part + 1);
      if (peer == rank)
        writer.add(StepKind::copy, 0, 0, 1, offset, size, {sent(peer)});
      else
        writer.add(StepKind::receive, peer, 0, 1, offset, size);
    }
    return writer.bytes();
  }

  // Every rank sends its vector to all, and folds all over the tree of ranks.
  static std::vector<std::byte> allreduce(uint32_t world, uint32_t rank, uint64_t size_bytes,
                                          sennit_dtype dtype = SENNIT_F32, sennit_reduce reduce = SENNIT_SUM) {
    PlanWriter writer(
        world, rank, 2,
        uint64_t{SENNIT_ALLREDUCE} << 56 | uint64_t{dtype} << 48 | size_bytes / element_size_bytes(dtype));
    for (uint32_t at = 0; at < size_bytes; at += MAX_LOAN_BYTES) {
      const uint64_t part = std::min<uint64_t>(MAX_LOAN_BYTES, size_bytes - at);
      const auto slot = static_cast<uint32_t>(at / MAX_LOAN_BYTES);
      for (uint32_t i = 1; i < world; ++i)
        writer.add(StepKind::send, (rank + i) % world, slot, 0, 0, part, {Operand{.offset = at}});
      std::vector<Operand> operands(world);
      std::vector<uint32_t> receives;
      for (uint32_t i = 1; i < world; ++i) {
        const uint32_t peer = (rank + world - i) % world;
        receives.push_back(writer.add(StepKind::receive, peer, slot, 0, 0, part, {}, STEP_LOAN));
        operands[peer] = {.kind = 1, .index = receives.back()};
      }
      operands[rank] = {.offset = at};
      for (uint32_t i = 0; i < world; ++i)
        operands[i].combinations = static_cast<uint8_t>(i + 1 == world ? std::popcount(i) : std::countr_one(i));
      const uint32_t fold = writer.add(StepKind::reduce, 0, 0, 1, at, part, operands);
      writer.step(fold).dtype = dtype;
      writer.step(fold).reduce = reduce;
      for (uint32_t receive : receives) writer.edge(receive, fold);
    }
    return writer.bytes();
  }

 private:
  uint32_t world_, rank_;
  uint16_t buffer_count_;
  uint64_t signature_;
  uint32_t count_count_ = 0, unit_bytes_ = 0;
  uint64_t scratch_bytes_ = 0;
  bool on_device_ = false;
  std::vector<Step> steps_;
  std::vector<Operand> operands_;
  std::vector<std::vector<uint32_t>> edges_;
};

// Why the core refuses the plan; empty if it does not.
inline std::string refusal(const PlanWriter& writer) {
  const std::vector<std::byte> bytes = writer.bytes();
  try {
    Plan::decode(bytes.data(), bytes.size());
  } catch (const PlanError& error) {
    return error.what();
  }
  return "";
}

// The engines of all ranks, connected through shared memory or UDP on loopback. Each is shut down at the end.
struct Group {
  Group(uint32_t world, uint64_t timeout_us, Route::Kind kind = Route::Kind::shm, uint32_t threads = 1,
        uint64_t blocked_us = EngineConfig{}.blocked_us) {
    std::vector<std::vector<std::byte>> offers;
    for (uint32_t rank = 0; rank < world; ++rank) {
      engines.push_back(new Engine({.rank = rank,
                                    .world = world,
                                    .timeout_us = timeout_us,
                                    .seed = rank,
                                    .ranks_here = world,
                                    .threads = threads,
                                    .blocked_us = blocked_us}));
      offers.push_back(offer(*engines.back(), kind));
    }
    // All ranks open all segments before any rank connects, because connecting unlinks the segment's name.
    for (uint32_t rank = 0; kind == Route::Kind::shm && rank < world; ++rank) {
      for (uint32_t peer = 0; peer < world; ++peer) {
        if (peer != rank) REQUIRE(engines[rank]->ports().shm_accept(peer, offers[peer]));
      }
    }
    for (uint32_t rank = 0; rank < world; ++rank) {
      std::vector<std::vector<std::byte>> infos = offers;
      for (uint32_t peer = 0; kind == Route::Kind::udp && peer < world; ++peer)
        if (peer != rank) infos[peer] = joined(offers[peer], engines[peer]->ports().offer_for(rank));
      engines[rank]->connect(routes(rank, kind, infos));
    }
  }
  ~Group() {
    for (Engine* engine : engines) {
      engine->shutdown(1'000'000);
      engine->release();
    }
  }
  Group(const Group&) = delete;

  static std::vector<std::byte> offer(Engine& engine, Route::Kind kind) {
    if (kind == Route::Kind::shm) return engine.ports().shm_offer();
    UdpConfig config;
    config.rails.push_back({"127.0.0.1", 0});
    config.path_count = 2;
    return engine.ports().udp_open(config);
  }
  // `infos`: what each peer tells this rank.
  static std::vector<Route> routes(uint32_t rank, Route::Kind kind, const std::vector<std::vector<std::byte>>& infos) {
    std::vector<Route> made;
    for (uint32_t peer = 0; peer < infos.size(); ++peer) {
      const Route::Kind to = peer == rank ? Route::Kind::self : kind;
      made.push_back({to, to == Route::Kind::udp ? infos[peer] : std::vector<std::byte>{}});
    }
    return made;
  }
  sennit_comm* comm(uint32_t rank) const { return reinterpret_cast<sennit_comm*>(engines[rank]); }

  std::vector<Engine*> engines;
};

// One thread for each rank, connected through shared memory. `body` runs on each.
inline void run_ranks(uint32_t world, uint64_t timeout_us, const std::function<void(Engine&, uint32_t)>& body) {
  const Group group(world, timeout_us);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < world; ++rank) threads.emplace_back([&, rank] { body(*group.engines[rank], rank); });
  for (auto& thread : threads) thread.join();
}

struct LoadedPlan {
  explicit LoadedPlan(const std::vector<std::byte>& bytes) {
    char error[256] = "";
    handle = sennit_plan_load(bytes.data(), bytes.size(), error, sizeof error);
    REQUIRE_MESSAGE(handle != nullptr, error);
  }
  ~LoadedPlan() { sennit_plan_release(handle); }
  sennit_plan* handle;
};

struct Result {
  sennit_status status = SENNIT_PENDING;
  std::string error;
};

inline Result run(Engine& engine, const LoadedPlan& plan, std::vector<float>& in, std::vector<float>& out,
                  uint32_t flags = 0) {
  const sennit_buffer buffers[] = {{in.data(), in.size() * 4}, {out.data(), out.size() * 4}};
  const sennit_post_options options{0, flags, 0, 1.0, nullptr, 0, 0};
  sennit_op* op = nullptr;
  char error[1024] = "";
  auto* comm = reinterpret_cast<sennit_comm*>(&engine);
  Result result;
  result.status = sennit_post(comm, plan.handle, buffers, 2, &options, &op, error, sizeof error);
  result.error = error;
  if (result.status != SENNIT_OK) return result;
  result.status = sennit_wait(op, 0);
  result.error = sennit_op_error(op);
  sennit_op_release(op);
  return result;
}

// Until another thread has done something. Far longer than that takes, also where others are busy.
inline void wait_until(const std::function<bool()>& is_so) {
  const uint64_t deadline_us = clock_us() + 20'000'000;
  while (!is_so()) {
    REQUIRE(clock_us() < deadline_us);
    std::this_thread::yield();
  }
}

}  // namespace sennit::test
