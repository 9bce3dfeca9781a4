// SPDX-License-Identifier: Apache-2.0
// Records of direct transfers that a broken peer could write. Each ends the lane with a reason, and none reaches memory
// that was not offered.
#include <doctest/doctest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "ports/shm/shm_lane.hpp"
#include "tests/forged_inbox.hpp"
#include "tests/heap_bytes.hpp"
#include "tests/shm_pair.hpp"

using namespace sennit;
using test::Bytes;
using test::ForgedInbox;
using test::ShmSink;
using Record = ForgedInbox::Record;
using Use = Lane::Use;

namespace {

constexpr uint64_t SIZE = 100;
constexpr uint64_t READS_HEAP = uint64_t{1} << 32, HAS_PLACE = uint64_t{2} << 32, IS_LOAN = uint64_t{4} << 32;
const std::string NO_RECEIVE_REFERRED = "referred to memory that fits no advertised receive";
const std::string NO_RECEIVE_PLACED = "placed a message that fits no advertised receive";
const std::string NO_REFERENCE = "gave back a reference that it does not have";
const std::string NO_BLOCK = "gave back a block that it does not have";

Record reference(uint64_t offset, uint64_t size_bytes = SIZE, uint32_t slot = 0, uint32_t number = 0) {
  return {ForgedInbox::REFERENCE, 0, 64, {0, 0, size_bytes}, slot, 0, 0, number, offset};
}
Record placed(uint64_t size_bytes = SIZE, uint32_t slot = 0) {
  return {ForgedInbox::PLACED, 0, 64, {0, 0, size_bytes}, slot};
}
Record fragment(uint32_t size_bytes, uint32_t block = 0, uint32_t slot = 0) {
  return {ForgedInbox::FRAGMENT, 0, 64, {}, slot, size_bytes, block};
}
Record returned(uint32_t number) { return {ForgedInbox::RETURNED, 0, 64, {}, 0, 0, 0, number}; }
Record returned_block(uint32_t block, uint32_t flags = 1) {
  return {ForgedInbox::RETURNED, flags, 64, {}, 0, 0, block};
}

// A lane whose peer is the test. The peer's heap is that of this process.
struct Forged {
  explicit Forged(bool shows_heap = true) : peers(SIZE, true) {
    peers.fill(1);
    in.inbox.segment = &own_segment;
    out.inbox.segment = &peers_segment;
    peers_segment.heap = *SharedHeap::name();
    peers_segment.has_heap = shows_heap ? 1 : 0;
    lane = std::make_unique<ShmLane>(0, in.inbox, out.inbox, sink);
  }
  // Why the peer is lost. Empty if it is not.
  std::string lost_by(const std::vector<Record>& records) {
    for (const Record& record : records) in.write(record);
    for (int round = 0; round < 20; ++round) lane->progress(1);
    REQUIRE(sink.lost.size() <= 1);
    REQUIRE(peers.are_guards_whole());
    return sink.lost.empty() ? "" : sink.lost[0];
  }
  uint64_t peers_offset() const { return SharedHeap::offset_of(peers.data()); }

  Bytes peers;  // in the peer's heap
  ShmSink sink;
  ForgedInbox in, out;
  ShmSegmentHeader own_segment{}, peers_segment{};
  std::unique_ptr<ShmLane> lane;
};

}  // namespace

TEST_CASE("a reference must lie in the heap, and fit a receive that is open and has nothing yet") {
  const uint64_t heap_bytes = [] {
    const Bytes some(1, true);
    return SharedHeap::name()->size_bytes;
  }();
  for (const bool is_loan : {false, true}) {
    for (const bool to_heap : {false, true}) {
      const auto lost_by = [&](const std::vector<Record>& records, bool shows_heap = true) {
        Bytes to(SIZE, to_heap);
        Forged forged(shows_heap);
        forged.lane->advertise(7, {1, 2, SIZE}, is_loan ? nullptr : to.data());
        const std::string reason = forged.lost_by(records);
        REQUIRE(to.are_guards_whole());
        REQUIRE(forged.sink.received.size() <= 1);
        if (forged.sink.received.empty()) REQUIRE((to.is_all(Bytes::GUARD) || !reason.empty()));
        return reason;
      };
      const uint64_t good = heap_bytes - SIZE;
      CHECK(lost_by({reference(good)}).empty());
      CHECK(lost_by({reference(good, SIZE, 0, UINT32_MAX)}).empty());  // the number is the peer's own
      for (const uint64_t offset : {good + 1, heap_bytes, heap_bytes + 1, UINT64_MAX, UINT64_MAX - SIZE,
                                    UINT64_MAX - SIZE + 1, uint64_t{1} << 63}) {
        CAPTURE(offset);
        CHECK(lost_by({reference(offset)}) == NO_RECEIVE_REFERRED);
      }
      for (const uint64_t size_bytes : {uint64_t{0}, SIZE - 1, SIZE + 1, UINT64_MAX, uint64_t{1} << 32 | SIZE})
        CHECK(lost_by({reference(0, size_bytes)}) == NO_RECEIVE_REFERRED);
      CHECK(lost_by({reference(0, SIZE, 1)}) == NO_RECEIVE_REFERRED);  // no such slot
      CHECK(lost_by({reference(0, SIZE, UINT32_MAX)}) == NO_RECEIVE_REFERRED);
      CHECK(lost_by({reference(0), reference(0)}) == NO_RECEIVE_REFERRED);
      CHECK(lost_by({reference(0), fragment(SIZE)}) == "described a fragment that fits no advertised receive");
      CHECK(lost_by({reference(0), placed()}) == NO_RECEIVE_PLACED);
      CHECK(lost_by({fragment(SIZE), reference(0)}) == NO_RECEIVE_REFERRED);
      if (!is_loan) CHECK(lost_by({fragment(SIZE - 1), reference(0)}) == NO_RECEIVE_REFERRED);
      CHECK(lost_by({reference(0)}, false) == NO_RECEIVE_REFERRED);  // it has shown no heap
    }
  }
}

TEST_CASE("only a message with a place can be placed, whole and once") {
  const auto lost_by = [](const std::vector<Record>& records, bool to_heap, bool is_loan = false) {
    Bytes to(SIZE, to_heap);
    Forged forged;
    forged.lane->advertise(7, {1, 2, SIZE}, is_loan ? nullptr : to.data());
    const std::string reason = forged.lost_by(records);
    REQUIRE(to.are_guards_whole());
    return reason;
  };
  CHECK(lost_by({placed()}, true).empty());
  CHECK(lost_by({placed()}, false) == NO_RECEIVE_PLACED);
  CHECK(lost_by({placed()}, true, true) == NO_RECEIVE_PLACED);
  for (const uint64_t size_bytes : {uint64_t{0}, SIZE - 1, SIZE + 1, UINT64_MAX})
    CHECK(lost_by({placed(size_bytes)}, true) == NO_RECEIVE_PLACED);
  for (const uint32_t slot : {1u, UINT32_MAX}) CHECK(lost_by({placed(SIZE, slot)}, true) == NO_RECEIVE_PLACED);
  CHECK(lost_by({placed(), placed()}, true) == NO_RECEIVE_PLACED);
  CHECK(lost_by({fragment(SIZE - 1), placed()}, true) == NO_RECEIVE_PLACED);
  CHECK(lost_by({fragment(SIZE), placed()}, true) == NO_RECEIVE_PLACED);
}

TEST_CASE("only what is out can be given back, and once") {
  for (const bool is_round_trip : {false, true}) {
    const auto lost_by = [&](const std::vector<Record>& records, size_t sent) {
      Bytes from(SIZE, true);
      Forged forged;
      forged.lane->transfer(9, READS_HEAP | IS_LOAN, from.data(), SIZE, is_round_trip ? Use::round_trip : Use::lend);
      forged.lane->progress(1);
      REQUIRE(forged.sink.sent.empty());
      const std::string reason = forged.lost_by(records);
      CHECK(forged.sink.sent.size() == sent);
      return reason;
    };
    CHECK(lost_by({returned(0)}, 1).empty());
    CHECK(lost_by({returned(0), returned(0)}, 1) == NO_REFERENCE);
    for (const uint32_t number : {1u, 2u, uint32_t{1} << 31, UINT32_MAX})
      CHECK(lost_by({returned(number)}, 0) == NO_REFERENCE);
    for (const uint32_t block : {0u, 1u, ForgedInbox::BLOCKS, UINT32_MAX})
      CHECK(lost_by({returned_block(block)}, 0) == NO_BLOCK);
  }
  Forged idle;
  CHECK(idle.lost_by({returned(0)}) == NO_REFERENCE);
}

TEST_CASE("a block with a result comes back once, and in no other way") {
  constexpr uint64_t TRIPS = 1 + ForgedInbox::BLOCKS;
  const auto lost_by = [&](const std::vector<Record>& records, size_t sent, uint32_t blocks_back = 0) {
    std::vector<std::unique_ptr<Bytes>> from;
    Forged forged;
    for (uint64_t trip = 0; trip < TRIPS; ++trip) {
      from.push_back(std::make_unique<Bytes>(SIZE, false));
      from[trip]->fill(static_cast<uint32_t>(trip));
      forged.lane->transfer(trip, IS_LOAN | trip, from[trip]->data(), SIZE, Use::round_trip);
    }
    for (int round = 0; round < 20; ++round) forged.lane->progress(1);
    REQUIRE(forged.sink.sent.empty());
    forged.out.inbox.header->blocks_back = blocks_back;
    std::memset(forged.out.inbox.bulk, 0x77, ForgedInbox::BLOCKS * BULK_BLOCK_BYTES);
    const std::string reason = forged.lost_by(records);
    CHECK(forged.sink.sent.size() == sent);
    for (const auto& bytes : from) CHECK(bytes->are_guards_whole());
    for (const uint64_t trip : forged.sink.sent)
      if (trip < ForgedInbox::BLOCKS) CHECK(from[trip]->is_all(std::byte{0x77}));
    return reason;
  };
  CHECK(lost_by({returned_block(1)}, 1).empty());
  CHECK(lost_by({returned_block(0), returned_block(1), returned_block(2)}, 3).empty());
  CHECK(lost_by({returned_block(1, UINT32_MAX)}, 1).empty());
  CHECK(lost_by({returned_block(2), returned_block(2)}, 2).empty());  // used again in between
  CHECK(lost_by({returned_block(2), returned_block(1), returned_block(1)}, 2) == NO_BLOCK);
  CHECK(lost_by({returned_block(2), returned_block(2), returned_block(2)}, 2) == NO_BLOCK);
  for (const uint32_t block : {ForgedInbox::BLOCKS, 31u, 32u, UINT32_MAX})
    CHECK(lost_by({returned_block(block)}, 0) == NO_BLOCK);
  CHECK(lost_by({returned(0)}, 0) == NO_REFERENCE);
  CHECK(lost_by({}, 0, 0b010) == "gave back a block without the result that it owes");
  CHECK(lost_by({}, 0, UINT32_MAX) == "gave back a block without the result that it owes");
}

TEST_CASE("a place beyond the peer's heap is none, and a round trip needs a loan") {
  Bytes from(SIZE, false), in_heap(SIZE, true);
  const uint64_t heap_bytes = SharedHeap::name()->size_bytes;
  for (const uint64_t offset : {heap_bytes - SIZE + 1, heap_bytes, UINT64_MAX, UINT64_MAX - SIZE + 1}) {
    CAPTURE(offset);
    Forged forged;
    CHECK(forged.lost_by({{ForgedInbox::ADVERT, 2, 64, {5, 0, SIZE}, 3, 0, 0, 0, offset}}).empty());
    REQUIRE(forged.sink.adverts.at(5) == (HAS_PLACE | 3));
    forged.lane->transfer(1, HAS_PLACE | 3, from.data(), SIZE);
    forged.lane->progress(1);
    CHECK(forged.sink.sent.size() == 1);
    CHECK(forged.lane->counters().fragments_sent == 1);
  }
  {
    Forged forged;
    const Record advert{ForgedInbox::ADVERT, 2, 64, {5, 0, SIZE}, 3, 0, 0, 0, forged.peers_offset()};
    CHECK(forged.lost_by({advert}).empty());
    forged.lane->transfer(1, HAS_PLACE | 3, from.fill(2).data(), SIZE);
    forged.lane->transfer(2, HAS_PLACE | 3, from.data(), SIZE);  // the place was good for one message
    for (int round = 0; round < 4; ++round) forged.lane->progress(1);
    CHECK(forged.lane->counters().placements_sent == 1);
    CHECK(forged.lane->counters().fragments_sent == 1);
    CHECK(forged.peers.holds(from.copy()));
  }
  for (const uint64_t flags : {uint64_t{0}, READS_HEAP, HAS_PLACE, READS_HEAP | HAS_PLACE}) {
    for (Bytes* const bytes : {&from, &in_heap}) {
      Forged forged;
      forged.lane->transfer(1, flags | 3, bytes->data(), SIZE, Use::round_trip);
      CHECK(forged.lost_by({}) == "takes a message that it must send back");
      CHECK(forged.sink.sent.empty());
    }
  }
}

TEST_CASE("random records of all kinds reach only what was offered") {
  size_t lost = 0, received = 0, sent = 0;
  for (uint32_t seed = 0; seed < 1'000; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto number = [&](uint64_t usual) {
      return random() % 16 != 0 ? random() % usual : uint64_t{random()} << (random() % 33);
    };
    Forged forged;
    Bytes plain(SIZE, false), heap(SIZE, true), from(SIZE, false), from_heap(SIZE, true);
    forged.lane->advertise(0, {0, 0, SIZE}, plain.data());
    forged.lane->advertise(1, {1, 0, SIZE}, heap.data());
    forged.lane->advertise(2, {2, 0, SIZE}, nullptr);
    forged.lane->transfer(0, READS_HEAP | IS_LOAN, from_heap.data(), SIZE, Use::round_trip);
    forged.lane->transfer(1, READS_HEAP, from_heap.data(), SIZE, Use::lend);
    forged.lane->transfer(2, IS_LOAN, from.data(), SIZE, Use::round_trip);
    forged.lane->progress(1);
    for (int count = 0; count < 12 && forged.sink.lost.empty(); ++count) {
      Record record{};
      record.type = static_cast<uint32_t>(number(9));
      record.flags = static_cast<uint32_t>(number(8));
      record.total_bytes = 64;
      record.header = {number(4), 0, number(3) != 0 ? SIZE : number(2 * SIZE)};
      record.slot = static_cast<uint32_t>(number(4));
      record.size_bytes = static_cast<uint32_t>(number(3) != 0 ? SIZE : number(2 * SIZE));
      record.block = static_cast<uint32_t>(number(4));
      record.number = static_cast<uint32_t>(number(4));
      record.offset = random() % 2 != 0 ? forged.peers_offset() : number(1 << 30);
      if (record.type == ForgedInbox::EAGER) continue;  // test_shm.cpp; needs its data
      static_cast<void>(forged.lost_by({record}));
      const auto loan = forged.sink.received.find(2);
      if (loan == forged.sink.received.end() || random() % 2 != 0) continue;
      const uint64_t id = loan->second.second;
      if (forged.lane->open(id)) forged.lane->send_back(id);
      forged.sink.received.erase(loan);
      ++received;
    }
    for (const Bytes* bytes : {&plain, &heap, &from, &from_heap}) REQUIRE(bytes->are_guards_whole());
    lost += forged.sink.lost.size();
    received += forged.sink.received.size();
    sent += forged.sink.sent.size();
    forged.lane->forget_user_memory();
  }
  CHECK(lost > 300);
  CHECK(received > 100);
  CHECK(sent > 30);
}
