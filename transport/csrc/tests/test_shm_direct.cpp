// SPDX-License-Identifier: Apache-2.0
// Direct transfers over shared memory: references, placements, loans and round trips.
#include <doctest/doctest.h>

#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/heap_pair.hpp"

using namespace sennit;
using test::Bytes;

using test::segment_of;
using Pair = test::HeapPair;
using Use = Lane::Use;

namespace {

// Inboxes of a rank, with the most and with the fewest blocks.
constexpr uint32_t INBOX_COUNTS[] = {2, 64};
constexpr std::byte OVER{0xEE};  // what tests overwrite messages with

bool is_in_heap(const std::byte* data, const PeerHeap& heap) {
  const std::byte* const begin = heap.at(0, 1);
  return data >= begin && data < begin + SharedHeap::name()->size_bytes;
}

}  // namespace

TEST_CASE("messages go the direct way as soon as both know the heaps, and arrive whole whichever way they go") {
  Pair pair;
  for (const size_t size_bytes : {1, 9'000, 131'072, 262'144, 262'145, 1'000'003}) {
    for (const bool from_heap : {false, true}) {
      for (const bool to_heap : {false, true}) {
        CAPTURE(size_bytes);
        CAPTURE(from_heap);
        CAPTURE(to_heap);
        Bytes from(size_bytes, from_heap), to(size_bytes, to_heap);
        const std::vector<std::byte> message = from.fill(static_cast<uint32_t>(size_bytes)).copy();
        for (const Use use : {Use::copy, Use::lend}) {
          to.fill_with(OVER);
          const ShmLane::Counters before = pair.sent();
          pair.move(true, from, to, use);
          CHECK(to.holds(message));
          CHECK(from.holds(message));
          CHECK((to.are_guards_whole() && from.are_guards_whole()));
          const bool is_placed = to_heap && (!from_heap || size_bytes <= 262'144);
          const bool is_referred = from_heap && !is_placed;
          CHECK(pair.sent().placements_sent - before.placements_sent == (is_placed ? 1 : 0));
          CHECK(pair.sent().references_sent - before.references_sent == (is_referred ? 1 : 0));
          CHECK((pair.sent().fragments_sent != before.fragments_sent) == (!is_placed && !is_referred));
          CHECK(pair.sent().bytes_sent - before.bytes_sent == size_bytes);
        }
      }
    }
  }
  CHECK((pair.a.idle() && pair.b.idle()));
}

TEST_CASE("the first message goes through blocks, which shows the heap, and the next one does not") {
  Pair pair(2, false);
  Bytes from(300'000, true), to(300'000, false);
  from.fill(1);
  pair.move(true, from, to);
  CHECK(pair.sent().fragments_sent == 3);
  CHECK(pair.sent().references_sent == 0);
  CHECK(to.holds(from.copy()));
  to.fill_with(OVER);
  pair.move(true, from, to);
  CHECK(pair.sent().fragments_sent == 3);
  CHECK(pair.sent().references_sent == 1);
  CHECK(to.holds(from.copy()));
  // A destination in the heap is shown by its advert, so that even the first message is placed.
  Bytes back(300'000, false), place(300'000, true);
  back.fill(2);
  pair.move(false, back, place);
  CHECK(pair.sent(false).placements_sent == 1);
  CHECK(place.holds(back.copy()));
}

TEST_CASE("messages in both directions and of all kinds share the lane") {
  Pair pair;
  constexpr size_t COUNT = 60;
  std::mt19937 random(3);
  std::vector<std::unique_ptr<Bytes>> from, to;
  for (size_t i = 0; i < COUNT; ++i) {
    const size_t size_bytes = 1 + random() % (i % 3 == 0 ? 1'200'000 : 150'000);
    from.push_back(std::make_unique<Bytes>(size_bytes, random() % 3 != 0));
    to.push_back(std::make_unique<Bytes>(size_bytes, random() % 2 != 0));
    from[i]->fill(static_cast<uint32_t>(i));
    pair.receiver(i % 2 == 0).advertise(i, {i, 0, size_bytes}, to[i]->data());
  }
  pair.pump();
  for (size_t i = 0; i < COUNT; ++i)
    pair.sender(i % 2 == 0)
        .transfer(i, pair.sender_sink(i % 2 == 0).adverts.at(i), from[i]->data(), from[i]->size(),
                  i % 5 == 0 ? Use::lend : Use::copy);
  pair.pump();
  for (size_t i = 0; i < COUNT; ++i) {
    CAPTURE(i);
    CHECK(pair.receiver_sink(i % 2 == 0).received.count(i) == 1);
    CHECK(to[i]->holds(from[i]->copy()));
    CHECK(to[i]->are_guards_whole());
  }
  CHECK((pair.sink_a.sent.size() == COUNT / 2 && pair.sink_b.sent.size() == COUNT / 2));
}

TEST_CASE("a loan lies in the sender's heap until it is released, unless the sender may not wait") {
  Pair pair;
  const auto heap = PeerHeap::open(*SharedHeap::name());
  Bytes from(100'000, true);
  const std::vector<std::byte> message = from.fill(4).copy();
  const auto [data, loan] = pair.lend(from, Use::lend);
  CHECK(is_in_heap(data, *heap));
  CHECK(std::memcmp(data, message.data(), message.size()) == 0);
  CHECK(pair.sink_a.sent.empty());
  CHECK(pair.receiver().release(loan));
  pair.pump();
  CHECK(pair.sink_a.sent.size() == 1);
  const auto [copied, copied_loan] = pair.lend(from, Use::copy);
  CHECK_FALSE(is_in_heap(copied, *heap));
  CHECK(pair.sink_a.sent.size() == 2);
  from.fill_with(OVER);
  CHECK(std::memcmp(copied, message.data(), message.size()) == 0);
  CHECK(pair.receiver().release(copied_loan));
}

TEST_CASE("many loans by reference are out at once, whatever the blocks are") {
  for (const uint32_t world : INBOX_COUNTS) {
    Pair pair(world);
    constexpr size_t COUNT = 30;
    std::vector<std::unique_ptr<Bytes>> from;
    for (size_t i = 0; i < COUNT; ++i) {
      from.push_back(std::make_unique<Bytes>(MAX_LOAN_BYTES - i, true));
      from[i]->fill(static_cast<uint32_t>(i));
      pair.receiver().advertise(i, {i, 0, from[i]->size()}, nullptr);
    }
    for (size_t sent = 0; sent < COUNT;) {
      pair.pump();
      REQUIRE(pair.sink_a.adverts.count(sent) == 1);
      for (; pair.sink_a.adverts.count(sent) != 0; ++sent)
        pair.sender().transfer(sent, pair.sink_a.adverts.at(sent), from[sent]->data(), from[sent]->size(), Use::lend);
      pair.pump();
    }
    REQUIRE(pair.sink_b.received.size() == COUNT);
    for (size_t i = COUNT; i-- > 0;) {
      const auto [data, loan] = pair.sink_b.received.at(i);
      CHECK(std::memcmp(data, from[i]->data(), from[i]->size()) == 0);
      CHECK(pair.receiver().release(loan));
    }
    pair.pump();
    CHECK(pair.sink_a.sent.size() == COUNT);
  }
}

TEST_CASE("what makes a round trip is overwritten with the result, by reference and through a block") {
  Pair pair;
  const auto heap = PeerHeap::open(*SharedHeap::name());
  for (const bool from_heap : {true, false}) {
    for (const size_t size_bytes : {size_t{1}, size_t{40'000}, size_t{MAX_LOAN_BYTES}}) {
      Bytes from(size_bytes, from_heap);
      const std::vector<std::byte> message = from.fill(5).copy();
      pair.sink_a.sent.clear();
      const auto [data, loan] = pair.lend(from, Use::round_trip);
      CHECK(is_in_heap(data, *heap) == from_heap);
      CHECK(std::memcmp(data, message.data(), size_bytes) == 0);
      CHECK(pair.sink_a.sent.empty());
      REQUIRE(pair.receiver().open(loan));
      std::memset(const_cast<std::byte*>(data), 0x77, size_bytes);
      pair.receiver().send_back(loan);
      pair.pump();
      CHECK(pair.sink_a.sent.size() == 1);
      CHECK(from.is_all(std::byte{0x77}));
      CHECK(from.are_guards_whole());
    }
  }
}

TEST_CASE("many round trips through few blocks come back in any order, with other messages between") {
  for (const uint32_t world : INBOX_COUNTS) {
    for (const bool from_heap : {false, true}) {
      Pair pair(world);
      constexpr size_t COUNT = 60;
      std::vector<std::unique_ptr<Bytes>> from;
      for (size_t i = 0; i < COUNT; ++i) {
        // Some lie in the other memory.
        from.push_back(std::make_unique<Bytes>(1 + (i * 7'919) % MAX_LOAN_BYTES, from_heap != (i % 7 == 0)));
        from[i]->fill(static_cast<uint32_t>(i));
        pair.receiver().advertise(i, {i, 0, from[i]->size()}, nullptr);
      }
      std::mt19937 random(6);
      std::vector<std::pair<uint64_t, std::pair<const std::byte*, uint64_t>>> held;
      size_t sent = 0, returned = 0;
      while (returned < COUNT) {
        pair.pump();
        for (; pair.sink_a.adverts.count(sent) != 0; ++sent)
          pair.sender().transfer(sent, pair.sink_a.adverts.at(sent), from[sent]->data(), from[sent]->size(),
                                 Use::round_trip);
        pair.pump();
        for (const auto& got : pair.sink_b.received) held.emplace_back(got);
        pair.sink_b.received.clear();
        REQUIRE_FALSE(held.empty());
        const size_t pick = random() % held.size();
        const auto [id, place] = held[pick];
        REQUIRE(std::memcmp(place.first, from[id]->data(), from[id]->size()) == 0);
        REQUIRE(pair.receiver().open(place.second));
        std::memset(const_cast<std::byte*>(place.first), static_cast<int>(id), from[id]->size());
        pair.receiver().send_back(place.second);
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(pick));
        ++returned;
        if (returned % 10 == 0) {
          const Bytes other(200'000, false), to(200'000, false);
          pair.receiver().advertise(COUNT + returned, {COUNT + returned, 0, other.size()}, to.data());
          pair.pump();
          pair.sender().transfer(COUNT + returned, pair.sink_a.adverts.at(COUNT + returned), other.data(),
                                 other.size());
          pair.pump();
          CHECK(pair.sink_b.received.erase(COUNT + returned) == 1);
        }
      }
      pair.pump();
      CHECK(pair.sink_a.sent.size() == COUNT + COUNT / 10);
      for (size_t i = 0; i < COUNT; ++i) {
        CHECK(from[i]->is_all(std::byte(i)));
        CHECK(from[i]->are_guards_whole());
      }
    }
  }
}

TEST_CASE("where a heap cannot be mapped, messages go through blocks, and errors say so") {
  Pair pair(2, false);
  for (const bool forth : {true, false}) {
    const ShmSegment segment = segment_of(forth ? pair.a : pair.b, forth ? 0 : 1);
    REQUIRE(static_cast<bool>(segment));
    REQUIRE(SharedHeap::allocate(1) != nullptr);
    segment.header().heap = *SharedHeap::name();
    segment.header().heap.nonce ^= 1;
    segment.header().has_heap = 1;
  }
  for (const bool forth : {true, false}) {
    for (const bool to_heap : {true, false}) {
      Bytes from(400'000, true), to(400'000, to_heap);
      from.fill(8);
      pair.move(forth, from, to, Use::lend);
      CHECK(to.holds(from.copy()));
    }
    CHECK(pair.sent(forth).references_sent + pair.sent(forth).placements_sent == 0);
    CHECK(pair.sent(forth).fragments_sent == 8);
    CHECK(pair.receiver(forth).describe().find("its shared heap cannot be mapped") != std::string::npos);
  }
  Bytes trip(50'000, true);
  trip.fill(9);
  const auto [data, loan] = pair.lend(trip, Use::round_trip);
  REQUIRE(pair.receiver().open(loan));
  std::memset(const_cast<std::byte*>(data), 0x11, trip.size());
  pair.receiver().send_back(loan);
  pair.pump();
  CHECK(trip.is_all(std::byte{0x11}));
}
