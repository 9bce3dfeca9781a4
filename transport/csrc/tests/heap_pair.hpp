// SPDX-License-Identifier: Apache-2.0
// Two ranks over shared memory that know each other's heaps, in one process.
#pragma once

#include "ports/shm/shm_port.hpp"
#include "tests/heap_bytes.hpp"
#include "tests/shm_pair.hpp"

namespace sennit::test {

// A pair in which both ranks know the other's heap: after the first message from it, and the first to it.
struct HeapPair : ShmPair {
  explicit HeapPair(uint32_t world = 2, bool is_warm = true) : ShmPair(world) {
    if (!is_warm) return;
    const Bytes from(10'000, true), to(10'000, true);
    for (const bool forth : {true, false}) {
      move(forth, from, to);
      move(forth, from, to);
    }
    sink_a = sink_b = {};
  }
  const ShmLane::Counters& sent(bool forth = true) { return static_cast<ShmLane&>(sender(forth)).counters(); }
  Lane& sender(bool forth = true) { return forth ? a.lane(1) : b.lane(0); }
  Lane& receiver(bool forth = true) { return forth ? b.lane(0) : a.lane(1); }
  ShmSink& sender_sink(bool forth = true) { return forth ? sink_a : sink_b; }
  ShmSink& receiver_sink(bool forth = true) { return forth ? sink_b : sink_a; }

  // The advert for message `key`, for a loan if there is no destination.
  uint64_t ask(uint64_t key, size_t size_bytes, std::byte* destination, bool forth = true) {
    receiver(forth).advertise(key, {key, 0, size_bytes}, destination);
    pump();
    REQUIRE(sender_sink(forth).adverts.contains(key));
    return sender_sink(forth).adverts.at(key);
  }
  void move(bool forth, const Bytes& from, const Bytes& to, Lane::Use use = Lane::Use::copy) {
    const uint64_t key = next_key_++, advert = ask(key, from.size(), to.data(), forth);
    sender(forth).transfer(key, advert, from.data(), from.size(), use);
    pump();
    REQUIRE(receiver_sink(forth).received.contains(key));
    REQUIRE(receiver_sink(forth).received.at(key).first == to.data());
    REQUIRE(sender_sink(forth).sent == std::vector<uint64_t>{key});
    sender_sink(forth).sent.clear();
  }
  // A loan of `from`; its bytes are at the result.
  std::pair<const std::byte*, uint64_t> lend(const Bytes& from, Lane::Use use) {
    const uint64_t key = next_key_++, advert = ask(key, from.size(), nullptr);
    sender().transfer(key, advert, from.data(), from.size(), use);
    pump();
    REQUIRE(sink_b.received.contains(key));
    return sink_b.received.at(key);
  }

 private:
  uint64_t next_key_ = 1'000;
};

// The segment of a rank, as a peer opens it.
inline ShmSegment segment_of(ShmPort& port, uint32_t rank) { return ShmSegment::open(port.offer(), rank, 2); }

}  // namespace sennit::test
