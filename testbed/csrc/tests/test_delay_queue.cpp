// SPDX-License-Identifier: Apache-2.0
// Packets that wait: their order, their bytes, and the memory that they lie in.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "delay_queue.hpp"

using sennit::DelayQueue;

namespace {

constexpr size_t PACKET_MAX_BYTES = 65'610;

void push(DelayQueue& queue, uint64_t due_ns, uint32_t number, size_t size_bytes) {
  const std::span<std::byte> room = queue.room();
  REQUIRE(room.size() == PACKET_MAX_BYTES);
  std::fill_n(room.begin(), size_bytes, std::byte(number));
  std::memcpy(room.data(), &number, sizeof number);
  queue.push(due_ns, size_bytes);
}

uint32_t number_of(std::span<const std::byte> packet) {
  uint32_t number;
  REQUIRE(packet.size() >= sizeof number);
  std::memcpy(&number, packet.data(), sizeof number);
  return number;
}

}  // namespace

TEST_CASE("packets leave by their time, and in the order they came in where times are equal") {
  std::mt19937_64 random(7);
  DelayQueue queue(PACKET_MAX_BYTES);
  std::vector<std::pair<uint64_t, uint32_t>> expected, sent;
  std::vector<size_t> sizes;
  const auto take = [&] {
    const std::span<const std::byte> packet = queue.front();
    const uint32_t number = number_of(packet);
    sent.emplace_back(queue.due_ns(), number);
    CHECK(packet.size() == sizes[number]);
    CHECK(std::all_of(packet.begin() + 4, packet.end(), [&](std::byte byte) { return byte == std::byte(number); }));
    queue.pop();
  };
  for (uint32_t number = 0; number < 2'000; ++number) {
    sizes.push_back(4 + random() % (number % 3 == 0 ? PACKET_MAX_BYTES - 4 : 200));
    const uint64_t due_ns = 1'000 * (number / 100) + random() % 500;  // they overtake each other within a hundred
    push(queue, due_ns, number, sizes.back());
    expected.emplace_back(due_ns, number);
    if (number % 100 == 99)
      while (queue.size() > 10 && queue.due_ns() < 1'000 * (number / 100 + 1)) take();
  }
  while (!queue.empty()) take();
  std::sort(expected.begin(), expected.end());
  CHECK(sent == expected);

  for (uint32_t number = 0; number < 1'000; ++number) push(queue, (number * 7919) % 50, number, 4);
  std::pair<uint64_t, uint32_t> before{};
  for (uint32_t count = 0; count < 1'000; ++count) {
    const std::pair now{queue.due_ns(), number_of(queue.front())};
    if (count != 0) CHECK(before < now);
    before = now;
    queue.pop();
  }
  CHECK(queue.empty());
}

TEST_CASE("memory is used again, however long the traffic lasts") {
  DelayQueue queue(PACKET_MAX_BYTES);
  // A packet that waits for long keeps its own chunk and no other.
  push(queue, UINT64_MAX, 0, 100);
  for (uint32_t number = 1; number < 10'000; ++number) {
    push(queue, number, number, PACKET_MAX_BYTES);
    if (queue.size() > 20) {
      CHECK(number_of(queue.front()) == number - 19);
      queue.pop();
    }
  }
  CHECK(queue.chunks() <= 5);  // 21 packets, 15 in a chunk
  while (queue.size() > 1) queue.pop();
  CHECK(number_of(queue.front()) == 0);
}

TEST_CASE("a largest packet that no chunk holds is refused") {
  CHECK_THROWS_AS(DelayQueue(0), std::invalid_argument);
  CHECK_THROWS_AS(DelayQueue(DelayQueue::CHUNK_BYTES + 1), std::invalid_argument);
}
