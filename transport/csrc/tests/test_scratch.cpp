// SPDX-License-Identifier: Apache-2.0
// Scratch that is kept between operations.
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "executor/scratch.hpp"

using sennit::ScratchPool;

namespace {

constexpr uint64_t MIB = 1 << 20;

}  // namespace

TEST_CASE("memory that came back is used again, for about the same size only") {
  ScratchPool pool;
  ScratchPool::Memory first = pool.take(4 * MIB);
  const std::byte* const at = first.get();
  std::memset(first.get(), 1, 4 * MIB);
  CHECK(pool.kept_bytes() == 0);
  first.reset();
  CHECK(pool.kept_bytes() == 4 * MIB);
  const ScratchPool::Memory larger = pool.take(4 * MIB + 1), far_smaller = pool.take(2 * MIB - 1);
  CHECK(larger.get() != at);
  CHECK(far_smaller.get() != at);
  ScratchPool::Memory again = pool.take(2 * MIB);
  CHECK(again.get() == at);
  std::memset(again.get(), 2, 4 * MIB);  // all of it is there
  const ScratchPool::Memory other = pool.take(4 * MIB);
  CHECK(other.get() != at);
}

TEST_CASE("small memory is not kept, and neither is more than the limit") {
  ScratchPool pool;
  pool.take(ScratchPool::POOLED_MIN_BYTES - 1).reset();
  pool.take(ScratchPool::KEPT_MAX_BYTES + 1).reset();
  CHECK(pool.kept_bytes() == 0);
  std::vector<ScratchPool::Memory> held;
  for (int block = 0; block < 5; ++block) held.push_back(pool.take(ScratchPool::KEPT_MAX_BYTES / 4));
  const std::byte* const oldest = held.front().get();
  for (ScratchPool::Memory& memory : held) memory.reset();
  CHECK(pool.kept_bytes() == ScratchPool::KEPT_MAX_BYTES);
  for (ScratchPool::Memory& memory : held) {
    memory = pool.take(ScratchPool::KEPT_MAX_BYTES / 4);
    if (pool.kept_bytes() != 0) CHECK(memory.get() != oldest);
  }
  held.clear();
  for (int block = 0; block < 100; ++block) held.push_back(pool.take(ScratchPool::POOLED_MIN_BYTES));
  held.clear();
  CHECK(pool.kept_bytes() <= ScratchPool::KEPT_MAX_BYTES);
}

TEST_CASE("threads that take and give back never share memory") {
  ScratchPool pool;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      for (int turn = 0; turn < 500; ++turn) {
        const ScratchPool::Memory memory = pool.take(ScratchPool::POOLED_MIN_BYTES);
        std::memset(memory.get(), number, ScratchPool::POOLED_MIN_BYTES);
        for (uint64_t at = 0; at < ScratchPool::POOLED_MIN_BYTES; at += 4'096)
          if (memory[at] != static_cast<std::byte>(number)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
}
