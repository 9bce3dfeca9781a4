// SPDX-License-Identifier: Apache-2.0
// What is left of direct transfers over shared memory when a rank takes its memory back.
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "tests/heap_pair.hpp"
#include "tests/in_child.hpp"

using namespace sennit;
using test::Bytes;
using test::check_in_child;
using test::Child;
using test::segment_of;
using Pair = test::HeapPair;
using Use = Lane::Use;

namespace {

constexpr std::byte OVER{0xEE};  // what an owner does with memory that it has back

}  // namespace

TEST_CASE("a receiver that is in the middle of the sender's memory drops it when the sender takes it back") {
  for (const bool says_why : {false, true}) {
    Pair pair;
    Bytes from(1'000'000, true), to(1'000'000, false);
    from.fill(10);
    const uint64_t advert = pair.ask(1, from.size(), to.data());
    pair.sender().transfer(1, advert, from.data(), from.size());
    pair.a.progress(1);
    pair.b.progress(1);  // a piece of it
    CHECK_FALSE(to.is_all(Bytes::GUARD));
    says_why ? pair.a.abort("the disk is full") : pair.a.revoke();
    from.fill_with(OVER);
    pair.pump();
    CHECK(pair.sink_b.received.empty());
    CHECK(pair.sink_a.sent.empty());
    REQUIRE(pair.sink_b.lost.size() == 1);
    CHECK(pair.sink_b.lost[0] ==
          (says_why ? "aborted: the disk is full" : "ended the group while its memory was in use"));
  }
}

TEST_CASE("a loan that was taken back is of no use, and nothing is written to it") {
  Pair pair;
  Bytes from(100'000, true), trip(100'000, true);
  from.fill(11);
  trip.fill(12);
  const uint64_t loan = pair.lend(from, Use::lend).second, loan_of_trip = pair.lend(trip, Use::round_trip).second;
  pair.a.abort("no more");
  trip.fill_with(OVER);
  CHECK_FALSE(pair.receiver().open(loan_of_trip));
  REQUIRE(pair.sink_b.lost.size() == 1);
  CHECK(pair.sink_b.lost[0] == "aborted: no more");
  CHECK_FALSE(pair.receiver().release(loan));
  CHECK(pair.sink_b.lost.size() == 1);
  CHECK(trip.is_all(OVER));
  pair.pump();
  CHECK(pair.sink_a.sent.empty());
}

TEST_CASE("a sender that was about to place finds the memory taken back") {
  Pair pair;
  Bytes from(1'000'000, false), to(1'000'000, true);
  from.fill(13);
  const uint64_t advert = pair.ask(1, from.size(), to.data());
  pair.sender().transfer(1, advert, from.data(), from.size());
  pair.a.progress(1);
  CHECK_FALSE(to.is_all(Bytes::GUARD));
  pair.b.revoke();
  to.fill_with(OVER);
  pair.pump();
  CHECK(to.is_all(OVER));
  CHECK(to.are_guards_whole());
  CHECK(pair.sink_a.sent.empty());
  REQUIRE(pair.sink_a.lost.size() == 1);
  CHECK(pair.sink_a.lost[0] == "ended the group while its memory was in use");
  // Nothing more begins on either side.
  pair.receiver().advertise(2, {2, 0, from.size()}, to.data());
  pair.sender().transfer(2, advert, from.data(), from.size());
  pair.pump();
  CHECK(to.is_all(OVER));
}

TEST_CASE("a rank that took its memory back answers no old advert") {
  Pair pair;
  Bytes from(100'000, true), to(100'000, false);
  const uint64_t advert = pair.ask(1, from.size(), to.data());
  const uint64_t loan = pair.lend(from, Use::round_trip).second;  // leaves a number that is out
  pair.a.revoke();
  const uint64_t references = pair.sent().references_sent;
  pair.sender().transfer(1, advert, from.data(), from.size());
  CHECK(pair.sent().references_sent == references);
  pair.a.revoke();
  CHECK_FALSE(pair.receiver().open(loan));
  pair.pump();
  CHECK(pair.sink_b.received.count(1) == 0);
}

TEST_CASE("two threads: after a revocation nothing is written, and what was received whole is right") {
  constexpr int ROUNDS = 60;
  Bytes from(600'000, true), to(600'000, false), place(200'000, true), trip(120'000, true);
  std::mt19937 random(14);
  for (int round = 0; round < ROUNDS; ++round) {
    CAPTURE(round);
    Pair pair;
    const std::vector<std::byte> message = from.fill(static_cast<uint32_t>(round)).copy();
    trip.fill_with(std::byte{1});
    const uint64_t read = pair.ask(1, from.size(), to.data()), placed = pair.ask(2, place.size(), place.data()),
                   lent = pair.ask(3, trip.size(), nullptr);
    const bool sender_ends = round % 2 == 0;
    const uint32_t turns = random() % 8;
    std::atomic<int> ready{0};
    const auto meet = [&] {
      ++ready;
      while (ready != 2) {
      }
    };
    bool is_right = true;
    std::thread sender([&] {
      meet();
      pair.sender().transfer(1, read, from.data(), from.size());
      pair.sender().transfer(2, placed, from.data(), place.size());
      pair.sender().transfer(3, lent, trip.data(), trip.size(), Use::round_trip);
      for (uint32_t turn = 0; turn < (sender_ends ? turns : 60); ++turn) pair.a.progress(1);
      if (!sender_ends) return;
      pair.a.revoke();
      from.fill_with(OVER);
      trip.fill_with(OVER);
    });
    std::thread receiver([&] {
      meet();
      bool is_back = false;
      for (uint32_t turn = 0; turn < (sender_ends ? 60 : turns); ++turn) {
        pair.b.progress(1);
        const auto got = pair.sink_b.received.find(3);
        if (is_back || got == pair.sink_b.received.end()) continue;
        is_back = true;
        const auto [data, loan] = got->second;
        if (!pair.receiver().open(loan)) continue;
        std::memset(const_cast<std::byte*>(data), 0x22, trip.size());
        pair.receiver().send_back(loan);
      }
      if (pair.sink_b.received.count(1) != 0) is_right &= to.holds(message);
      if (sender_ends) return;
      pair.b.revoke();
      place.fill_with(OVER);
    });
    sender.join();
    receiver.join();
    CHECK(is_right);
    if (sender_ends) {
      CHECK((from.is_all(OVER) && trip.is_all(OVER)));
    } else {
      CHECK(place.is_all(OVER));
    }
    CHECK((from.are_guards_whole() && to.are_guards_whole() && place.are_guards_whole() && trip.are_guards_whole()));
  }
}

TEST_CASE("a peer that is stopped while it writes holds nobody up, and its late writes arrive nowhere") {
  // In a child, because the process gives its heap up.
  check_in_child([](Child child) {
    Pair pair;
    const auto heap = PeerHeap::open(*SharedHeap::name());
    Bytes from(300'000, true), place(300'000, true), trip(100'000, true), other(100'000, true);
    from.fill(15);
    other.fill(16);
    const std::vector<std::byte> before = other.copy();
    pair.ask(1, place.size(), place.data());
    pair.lend(trip, Use::round_trip);
    const auto view_of = [&](const Bytes& bytes) {
      return heap->at(SharedHeap::offset_of(bytes.data()), bytes.size());
    };
    std::byte *const late_place = view_of(place), *const late_trip = view_of(trip);
    place.fill_with(std::byte{1});
    trip.fill_with(std::byte{2});
    ShmSegment of_a = segment_of(pair.a, 0), of_b = segment_of(pair.b, 1);
    of_b.inbox(0).header->is_writing = 1;  // rank 0 places,
    of_a.inbox(1).header->is_writing = 1;  // and rank 1 writes its result
    pair.b.revoke();
    CHILD_REQUIRE(child, !SharedHeap::contains(place.data(), 1));
    std::memset(late_place, 0xEE, place.size());
    CHILD_REQUIRE(child, place.is_all(std::byte{1}) && place.are_guards_whole());
    of_a.inbox(1).header->is_writing = 1;  // which the revocation had ended
    pair.a.revoke();
    std::memset(late_trip, 0xEE, trip.size());
    CHILD_REQUIRE(child, trip.is_all(std::byte{2}) && trip.are_guards_whole());
    CHILD_REQUIRE(child, other.holds(before));
    CHILD_REQUIRE(child, SharedHeap::allocate(1) == nullptr && !SharedHeap::name());
    // Other groups of this process go on, without their heap.
    test::ShmPair late;
    late.b.lane(0).advertise(1, {1, 0, from.size()}, place.data());
    late.pump();
    late.a.lane(1).transfer(1, late.sink_a.adverts.at(1), from.data(), from.size(), Use::lend);
    late.pump();
    CHILD_REQUIRE(child, late.sink_b.received.count(1) == 1 && place.holds(from.copy()));
  });
}

TEST_CASE("groups that were using a heap when it was given up fail, rather than to miss bytes") {
  check_in_child([](Child child) {
    Pair placed, returned, sent;
    Bytes from(200'000, false), to(200'000, true), trip(100'000, true), lent(100'000, true), elsewhere(1, true);
    from.fill(17);
    lent.fill(18);
    const uint64_t place = placed.ask(1, from.size(), to.data());
    const auto [data, loan] = returned.lend(trip, Use::round_trip);
    const auto [lent_data, lent_loan] = sent.lend(lent, Use::lend);
    SharedHeap::detach(elsewhere.data(), 1);
    placed.sender().transfer(1, place, from.data(), from.size());
    placed.pump();
    CHILD_REQUIRE(child, placed.sink_b.received.empty() && placed.sink_b.lost.size() == 1);
    CHILD_REQUIRE(child, returned.receiver().open(loan));
    returned.receiver().send_back(loan);
    returned.pump();
    CHILD_REQUIRE(child, returned.sink_a.sent.empty() && returned.sink_a.lost.size() == 1);
    // What is only read is still right.
    CHILD_REQUIRE(child, lent.holds({lent_data, lent_data + lent.size()}));
    CHILD_REQUIRE(child, sent.receiver().release(lent_loan));
    sent.pump();
    CHILD_REQUIRE(child, sent.sink_a.sent.size() == 1 && sent.sink_b.lost.empty());
  });
}
