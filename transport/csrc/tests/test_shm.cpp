// SPDX-License-Identifier: Apache-2.0
// The shared-memory port: what it carries, how it wakes, and what a broken peer can do to it.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "executor/engine.hpp"
#include "ports/shm/shm_port.hpp"
#include "tests/forged_inbox.hpp"
#include "tests/shm_pair.hpp"

using namespace sennit;
using test::ForgedInbox;

namespace {

using Pair = test::ShmPair;
using Sink = test::ShmSink;

std::vector<std::byte> noise(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Inboxes of a rank, with the most and with the fewest blocks.
constexpr uint32_t INBOX_COUNTS[] = {2, 64};

}  // namespace

TEST_CASE("eager messages of all sizes wrap round the ring in order") {
  Pair pair;
  std::mt19937 random(1);
  uint64_t key = 0, pending = 0;
  std::map<uint64_t, std::vector<std::byte>> expected;
  for (int round = 0; round < 5'000; ++round) {
    const std::vector<std::byte> data = noise(random() % 8'193, round);
    if (pair.a.lane(1).send_eager({key, 0, data.size()}, EAGER_DATA, data.data())) {
      expected[key++] = data;
      ++pending;
    } else {
      CHECK(pending > 0);
      pair.pump();
      pending = 0;
    }
  }
  pair.pump();
  REQUIRE(pair.sink_b.eager.size() == key);
  for (uint64_t i = 0; i < key; ++i) {
    CHECK(pair.sink_b.eager[i].first == i);
    CHECK(pair.sink_b.eager[i].second == expected[i]);
  }
}

TEST_CASE("transfers land where they were advertised, larger than the ring, both ways at once") {
  Pair pair;
  const std::vector<size_t> sizes = {1, 63, 64, 4'097, 131'072, 131'073, 3'000'001};
  std::vector<std::vector<std::byte>> from_a, from_b, to_a, to_b;
  for (size_t i = 0; i < sizes.size(); ++i) {
    from_a.push_back(noise(sizes[i], 100 + i));
    from_b.push_back(noise(sizes[i], 200 + i));
    to_a.emplace_back(sizes[i]);
    to_b.emplace_back(sizes[i]);
    pair.a.lane(1).advertise(i, {i, 0, sizes[i]}, to_a[i].data());
    pair.b.lane(0).advertise(i, {i, 0, sizes[i]}, to_b[i].data());
  }
  pair.pump();
  for (size_t i = 0; i < sizes.size(); ++i) {
    pair.a.lane(1).transfer(i, pair.sink_a.adverts.at(i), from_a[i].data(), sizes[i]);
    pair.b.lane(0).transfer(i, pair.sink_b.adverts.at(i), from_b[i].data(), sizes[i]);
  }
  pair.pump();
  CHECK(to_b == from_a);
  CHECK(to_a == from_b);
  CHECK(pair.sink_a.sent.size() == sizes.size());
  CHECK(pair.a.idle());
}

TEST_CASE("loans stay in the ring: they are granted as others come back, in any order") {
  for (const uint32_t world : INBOX_COUNTS) {
    Pair pair(world);
    constexpr size_t COUNT = 40;
    std::vector<std::vector<std::byte>> data;
    for (size_t i = 0; i < COUNT; ++i) {
      data.push_back(noise(MAX_LOAN_BYTES - i, i));
      pair.b.lane(0).advertise(i, {i, 0, data[i].size()}, nullptr);
    }
    std::mt19937 random(2);
    struct Held {
      uint64_t id;
      const std::byte* data;
      uint64_t loan;
    };
    std::vector<Held> held;
    size_t transferred = 0, checked = 0;
    while (checked < COUNT) {
      pair.pump();
      for (; pair.sink_a.adverts.count(transferred) != 0; ++transferred) {
        pair.a.lane(1).transfer(transferred, pair.sink_a.adverts.at(transferred), data[transferred].data(),
                                data[transferred].size());
      }
      pair.pump();
      for (auto& [id, place] : pair.sink_b.received) {
        CHECK(std::memcmp(place.first, data[id].data(), data[id].size()) == 0);
        held.push_back({id, place.first, place.second});
        ++checked;
      }
      pair.sink_b.received.clear();
      REQUIRE_FALSE(held.empty());
      const size_t pick = random() % held.size();
      // Other loans came and went since. The bytes of this loan are still there.
      CHECK(std::memcmp(held[pick].data, data[held[pick].id].data(), data[held[pick].id].size()) == 0);
      CHECK(pair.b.lane(0).release(held[pick].loan));
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(pick));
    }
  }
}

TEST_CASE("loans that are kept for long do not hold up other messages") {
  for (const uint32_t world : INBOX_COUNTS) {
    Pair pair(world);
    constexpr uint64_t LOANS = 10;  // more than can be out at once
    const std::vector<std::byte> lent = noise(MAX_LOAN_BYTES, 1), plain = noise(3'000'001, 2);
    std::vector<std::byte> to_b(plain.size());
    for (uint64_t i = 0; i < LOANS; ++i) pair.b.lane(0).advertise(i, {i, 0, lent.size()}, nullptr);
    pair.b.lane(0).advertise(LOANS, {LOANS, 0, plain.size()}, to_b.data());
    pair.pump();
    const size_t granted = pair.sink_a.adverts.size() - 1;
    REQUIRE(granted > 0);
    REQUIRE(granted < LOANS);
    for (uint64_t i = 0; i < granted; ++i)
      pair.a.lane(1).transfer(i, pair.sink_a.adverts.at(i), lent.data(), lent.size());
    pair.a.lane(1).transfer(LOANS, pair.sink_a.adverts.at(LOANS), plain.data(), plain.size());
    pair.pump();
    CHECK(pair.sink_b.received.size() == granted + 1);
    CHECK(to_b == plain);
    for (const auto& [id, place] : pair.sink_b.received) {
      if (id < LOANS) CHECK(std::memcmp(place.first, lent.data(), lent.size()) == 0);
    }
  }
}

TEST_CASE("a fragment in a block that is lent loses the peer") {
  Sink sink;
  ForgedInbox in, out;
  ShmLane lane(0, in.inbox, out.inbox, sink);
  for (uint64_t id = 0; id < 2; ++id) lane.advertise(id, {id, 0, 100}, nullptr);
  in.write({ForgedInbox::FRAGMENT, 0, 64, {}, 0, 100, 0, {}});
  lane.drain();
  REQUIRE(sink.received.size() == 1);
  in.write({ForgedInbox::FRAGMENT, 0, 64, {}, 1, 100, 0, {}});
  lane.drain();
  REQUIRE(sink.lost.size() == 1);
  CHECK(sink.lost[0] == "described a fragment that fits no advertised receive");
}

TEST_CASE("a message that the mailbox has no room for stays in the ring and is offered again") {
  Pair pair;
  pair.sink_b.refuse_eager = true;
  const std::vector<std::byte> data = noise(100, 1);
  REQUIRE(pair.a.lane(1).send_eager({1, 0, 100}, EAGER_DATA, data.data()));
  pair.pump();
  CHECK(pair.sink_b.eager.empty());
  pair.sink_b.refuse_eager = false;
  pair.pump();
  CHECK(pair.sink_b.eager.size() == 1);
}

TEST_CASE("what a rank sent before it ended the group arrives before its last word") {
  Pair pair;
  constexpr size_t COUNT = 200;  // more than one round takes
  for (uint64_t key = 0; key < COUNT; ++key) REQUIRE(pair.a.lane(1).send_eager({key, 0, 0}, EAGER_DATA, nullptr));
  pair.a.abort("the disk is full");
  while (pair.sink_b.lost.empty()) REQUIRE((pair.b.progress(1) || !pair.sink_b.lost.empty()));
  CHECK(pair.sink_b.eager.size() == COUNT);
  CHECK(pair.sink_b.lost[0] == "aborted: the disk is full");
}

TEST_CASE("a sleeping rank is woken by a publication, and does not sleep through one") {
  Pair pair;
  Sleep how = Sleep::awake;
  SUBCASE("in a futex") { how = Sleep::futex; }
  SUBCASE("in poll(2), as beside sockets") { how = Sleep::poll; }
  std::thread sleeper([&] {
    const uint64_t deadline_us = clock_us() + 10'000'000;
    while (pair.sink_b.eager.size() < 200 && clock_us() < deadline_us) {
      const uint32_t ticket = pair.b.prepare_sleep(how);
      if (pair.b.progress(1)) {
        pair.b.cancel_sleep();
      } else if (how == Sleep::futex) {
        pair.b.sleep(ticket, 5'000'000);
      } else {
        std::vector<pollfd> bell;
        pair.b.append_poll_fds(bell);
        poll(bell.data(), bell.size(), 5'000);
        pair.b.cancel_sleep();
        pair.b.silence_bell();
      }
    }
  });
  std::mt19937 random(4);
  for (uint64_t i = 0; i < 200; ++i) {
    while (!pair.a.lane(1).send_eager({i, 0, 0}, EAGER_DATA, nullptr)) std::this_thread::yield();
    pair.a.progress(1);
    if (random() % 4 == 0) std::this_thread::yield();
  }
  sleeper.join();
  CHECK(pair.sink_b.eager.size() == 200);
}

TEST_CASE("several peers with news for a sleeping rank wake it once") {
  ShmPort sleeper(0, 3), first(1, 3), second(2, 3);
  Sink sink, sink_first, sink_second;
  for (ShmPort* peer : {&first, &second}) {
    const uint32_t rank = peer == &first ? 1 : 2;
    REQUIRE(peer->accept(0, sleeper.offer()));
    REQUIRE(sleeper.accept(rank, peer->offer()));
    peer->connect(0, rank == 1 ? sink_first : sink_second);
    sleeper.connect(rank, sink);
  }
  const auto send_from = [](ShmPort& peer) {
    REQUIRE(peer.lane(0).send_eager({7, 0, 0}, EAGER_DATA, nullptr));
    peer.progress(1);
  };
  std::vector<pollfd> bell;
  sleeper.append_poll_fds(bell);
  REQUIRE(bell.size() == 1);
  const auto rings = [&] {
    char bytes[64];
    return std::max<ssize_t>(0, read(bell[0].fd, bytes, sizeof bytes));
  };
  send_from(first);
  CHECK(rings() == 0);  // it was awake
  sleeper.prepare_sleep(Sleep::poll);
  send_from(first);
  send_from(second);
  CHECK(poll(bell.data(), 1, 0) == 1);
  CHECK(rings() == 1);
  sleeper.prepare_sleep(Sleep::poll);
  sleeper.cancel_sleep();
  send_from(second);
  CHECK(rings() == 0);
  CHECK(sleeper.progress(1));
  CHECK(sink.eager.size() == 4);
}

TEST_CASE("garbage in the ring loses the peer, not the process") {
  for (uint32_t seed = 0; seed < 2'000; ++seed) {
    Sink sink;
    std::vector<std::byte> memory(sizeof(ShmInboxHeader) + CONTROL_RING_BYTES + BULK_BLOCKS_MIN * BULK_BLOCK_BYTES +
                                  128);
    auto* base = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    const ShmInbox inbox{.header = reinterpret_cast<ShmInboxHeader*>(base),
                         .control = base + sizeof(ShmInboxHeader),
                         .bulk = base + sizeof(ShmInboxHeader) + CONTROL_RING_BYTES,
                         .bulk_blocks = BULK_BLOCKS_MIN};
    std::mt19937 random(seed);
    for (size_t i = 0; i < 4'096; ++i) {
      // Small numbers, so that valid types and sizes are common.
      inbox.control[i] = static_cast<std::byte>(i % 4 == 0 ? random() % 8 * (random() % 3 == 0 ? 32 : 1) : 0);
    }
    inbox.header->control_head = 64 * (1 + random() % 64);
    ShmLane lane(0, inbox, inbox, sink);
    std::vector<std::byte> destination(64);
    lane.drain();
    CHECK(sink.lost.size() <= 1);
  }
}

TEST_CASE("fragments and eager messages that fit nothing lose the peer before anything is touched") {
  const auto fragment = [](uint32_t slot, uint32_t size_bytes, uint32_t block) {
    return ForgedInbox::Record{ForgedInbox::FRAGMENT, 0, 64, {}, slot, size_bytes, block, {}};
  };
  // Why a peer is lost that writes `records` while a message of 100 bytes is advertised in slot 0; empty if it is not.
  const auto lost_by = [&](const std::vector<ForgedInbox::Record>& records, bool is_loan) {
    Sink sink;
    ForgedInbox in, out;
    ShmLane lane(0, in.inbox, out.inbox, sink);
    std::vector<std::byte> destination(100 + 64, std::byte{0x5A});
    lane.advertise(7, {1, 2, 100}, is_loan ? nullptr : destination.data());
    for (const auto& record : records) in.write(record);
    lane.drain();
    for (size_t i = 100; i < destination.size(); ++i) REQUIRE(destination[i] == std::byte{0x5A});
    REQUIRE(sink.received.size() <= 1);
    REQUIRE(sink.lost.size() <= 1);
    return sink.lost.empty() ? std::string() : sink.lost[0];
  };
  const std::string misfit = "described a fragment that fits no advertised receive";
  CHECK(lost_by({fragment(0, 100, 0)}, false).empty());
  CHECK(lost_by({fragment(0, 40, 0), fragment(0, 60, 1)}, false).empty());
  CHECK(lost_by({fragment(0, 100, 0)}, true).empty());
  CHECK(lost_by({fragment(1, 100, 0)}, false) == misfit);                     // no such slot
  CHECK(lost_by({fragment(0, 101, 0)}, false) == misfit);                     // too long
  CHECK(lost_by({fragment(0, 40, 0), fragment(0, 61, 1)}, false) == misfit);  // too long in all
  CHECK(lost_by({fragment(0, 100, 0), fragment(0, 0, 1)}, false) == misfit);  // complete already
  CHECK(lost_by({fragment(0, 100, ForgedInbox::BLOCKS)}, false) == misfit);   // no such block
  CHECK(lost_by({fragment(0, 100, UINT32_MAX)}, false) == misfit);
  CHECK(lost_by({fragment(0, 99, 0)}, true) == misfit);                        // a loan comes whole
  CHECK(lost_by({fragment(0, 100, 0), fragment(0, 100, 1)}, true) == misfit);  // and once
  const std::string malformed = "wrote a malformed eager message into shared memory";
  CHECK(lost_by({{ForgedInbox::EAGER, EAGER_DATA, 128, {1, 2, 64}, 0, 0, 0, {}}}, false).empty());
  CHECK(lost_by({{ForgedInbox::EAGER, EAGER_DATA, 128, {1, 2, 65}, 0, 0, 0, {}}}, false) == malformed);
  CHECK(lost_by({{ForgedInbox::EAGER, EAGER_DATA, 64, {1, 2, UINT64_MAX}, 0, 0, 0, {}}}, false) == malformed);
  CHECK(lost_by({{ForgedInbox::EAGER, 2, 128, {1, 2, 64}, 0, 0, 0, {}}}, false) == malformed);
}

TEST_CASE("the blocks of an inbox take memory when they are reserved, and nobody else's do") {
  const ShmSegment segment = ShmSegment::create(0, 0, 3, 0xB10C0000u + static_cast<uint64_t>(getpid()));
  const auto held_bytes = [&] {
    struct stat info {};
    REQUIRE(fstat(segment.inbox(1).fd, &info) == 0);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  };
  const uint64_t at_first_bytes = held_bytes();
  CHECK(at_first_bytes >= 2 * CONTROL_RING_BYTES);
  CHECK(at_first_bytes < 2 * CONTROL_RING_BYTES + BULK_BLOCK_BYTES);
  const uint64_t blocks = segment.inbox(1).bulk_blocks;
  // A block does not begin at a page.
  for (const uint64_t each_bytes : {uint64_t{1}, uint64_t{65'536}, BULK_BLOCK_BYTES, BULK_BLOCK_BYTES}) {
    REQUIRE(segment.inbox(1).reserve_blocks(each_bytes) == 0);
    CHECK(held_bytes() + 4'096 >= at_first_bytes + blocks * each_bytes);
    CHECK(held_bytes() <= at_first_bytes + blocks * (each_bytes + 8'192));
  }
}

TEST_CASE("blocks take as much memory as the largest receive needs") {
  const ShmSegment segment = ShmSegment::create(0, 0, 3, 0xB10D0000u + static_cast<uint64_t>(getpid()));
  const auto held_bytes = [&] {
    struct stat info {};
    REQUIRE(fstat(segment.inbox(1).fd, &info) == 0);
    return static_cast<uint64_t>(info.st_blocks) * 512;
  };
  new (segment.inbox(1).header) ShmInboxHeader{};
  Sink sink;
  ForgedInbox out;
  ShmLane lane(1, segment.inbox(1), out.inbox, sink);
  const uint64_t blocks = segment.inbox(1).bulk_blocks, at_first_bytes = held_bytes();
  std::vector<std::byte> destination(2 * BULK_BLOCK_BYTES);
  lane.advertise(1, {1, 2, 0}, destination.data());
  CHECK(held_bytes() == at_first_bytes);
  lane.advertise(2, {1, 2, 100}, destination.data());
  const uint64_t small_bytes = held_bytes();
  CHECK(small_bytes > at_first_bytes);
  CHECK(small_bytes <= at_first_bytes + blocks * 3 * 4'096);
  lane.advertise(3, {1, 2, 4'096}, nullptr);
  CHECK(held_bytes() == small_bytes);
  lane.advertise(4, {1, 2, 2 * BULK_BLOCK_BYTES}, destination.data());
  CHECK(held_bytes() + 4'096 >= at_first_bytes + blocks * BULK_BLOCK_BYTES);
}

TEST_CASE("a rank that gets no memory for blocks asks the peer for nothing and says why") {
  Sink sink;
  ForgedInbox in, out;
  in.inbox.fd = open("/dev/full", O_RDWR | O_CLOEXEC);
  REQUIRE(in.inbox.fd >= 0);
  ShmLane lane(3, in.inbox, out.inbox, sink);
  std::vector<std::byte> destination(100);
  CHECK(lane.failure().empty());
  lane.advertise(7, {1, 2, 100}, destination.data());
  lane.advertise(8, {1, 2, 100}, nullptr);
  lane.progress(1);
  CHECK(out.inbox.header->control_head == 0);
  CHECK(lane.failure().starts_with("no memory in /dev/shm for large messages of rank 3: "));
  close(in.inbox.fd);
}

TEST_CASE("an offer that is foreign, stale or short opens no shared memory") {
  ShmPort a(0, 2), b(1, 2);
  std::vector<std::byte> offer = b.offer();
  CHECK_FALSE(a.accept(1, std::span(offer).first(4)));
  offer[0] ^= std::byte{1};
  std::string why;
  CHECK_FALSE(a.accept(1, offer, &why));
  CHECK(why.starts_with("no such file here"));
  CHECK_FALSE(a.accept(1, ShmPort(0, 2).offer()));  // unlinked with its owner
  ShmPort other(0, 2);
  CHECK_FALSE(a.accept(1, other.offer(), &why));  // a segment of rank 0, not of rank 1
  CHECK(why == "what is there is no segment of that rank");
  CHECK(a.accept(1, b.offer()));
}

TEST_CASE("a segment without a name is opened by what its offer says, and by nothing else") {
  const auto pid = static_cast<uint64_t>(getpid());
  const ShmSegment segment = ShmSegment::create_unnamed(1, 1, 2, 0xCAFE0000u + pid);
  const ShmSegment other = ShmSegment::create_unnamed(1, 1, 2, 0xCAFF0000u + pid);
  const std::vector<std::byte> offer = segment.offer(), strange = other.offer();
  const ShmSegment opened = ShmSegment::open(offer, 1, 2);
  REQUIRE(static_cast<bool>(opened));
  new (segment.inbox(0).header) ShmInboxHeader{};
  segment.inbox(0).header->control_head = 77;
  CHECK(opened.inbox(0).header->control_head == 77);
  CHECK(segment.inbox(0).reserve_blocks(BULK_BLOCK_BYTES) == 0);
  std::memset(opened.inbox(0).bulk, 1, opened.inbox(0).bulk_blocks * BULK_BLOCK_BYTES);
  // The bell of another segment, and descriptors that are no segment.
  pollfd bell{segment.bell_fd(), POLLIN, 0};
  CHECK(poll(&bell, 1, 0) == 0);
  segment.header().sleeping = static_cast<uint32_t>(Sleep::poll);
  opened.wake_owner();
  CHECK(poll(&bell, 1, 0) == 1);
  segment.silence_bell();
  CHECK(poll(&bell, 1, 0) == 0);
  const auto opens = [&](size_t at, const std::byte* from, size_t size_bytes) {
    std::vector<std::byte> wrong = offer;
    std::memcpy(wrong.data() + at, from, size_bytes);
    return static_cast<bool>(ShmSegment::open(wrong, 1, 2));
  };
  CHECK(opens(8, offer.data() + 8, 12));
  CHECK_FALSE(opens(12, strange.data() + 12, 4));  // the other memory
  CHECK_FALSE(opens(12, offer.data() + 16, 4));    // the bell in place of the memory
  CHECK_FALSE(opens(16, offer.data() + 12, 4));    // and the other way round
  const int32_t none = -1;
  CHECK_FALSE(opens(8, reinterpret_cast<const std::byte*>(&none), 4));
  CHECK_FALSE(static_cast<bool>(ShmSegment::open(offer, 0, 2)));
  CHECK_FALSE(static_cast<bool>(ShmSegment::open(std::span(offer).first(20), 1, 2)));
}
