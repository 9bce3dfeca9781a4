// SPDX-License-Identifier: Apache-2.0
// The lane over a flow: loans, held eager messages, ids handed through.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ports/flow_lane.hpp"
#include "sim.hpp"

using namespace sennit;

namespace {

struct RecordingSink final : LaneSink {
  bool on_eager(uint32_t peer, const MessageHeader& header, uint32_t flags, const std::byte* data) override {
    CHECK(peer == 7);
    if (eager_refusals > 0) return --eager_refusals, false;
    eager.emplace_back(
        std::to_string(header.key) + ":" + std::to_string(flags) + ":" +
        std::string(reinterpret_cast<const char*>(data), flags == EAGER_REQUEST ? 0 : header.size_bytes));
    return true;
  }
  void on_advert(uint32_t, const MessageHeader& header, uint64_t advert_id) override {
    adverts.push_back(header.key);
    if (late.contains(header.key)) {
      REQUIRE(late_adverts.emplace(header.key, advert_id).second);
      return;
    }
    lane->transfer(header.key, advert_id, source.data(), header.size_bytes);
  }
  void on_advert_withdrawn(uint32_t, const MessageHeader& header) override {
    REQUIRE(late_adverts.erase(header.key) == 1);
    ++withdrawn;
  }
  // The program gets to its late messages.
  void send_late(uint64_t size_bytes) {
    late.clear();
    for (const auto& [key, advert_id] : std::exchange(late_adverts, {}))
      lane->transfer(key, advert_id, source.data(), size_bytes);
  }
  void on_received(uint64_t receive_id, const std::byte* data, uint64_t loan_id) override {
    received.push_back(receive_id);
    lent.push_back(data);
    loans.push_back(loan_id);
  }
  void on_sent(uint64_t send_id) override { sent.push_back(send_id); }
  void on_peer_lost(uint32_t, std::string reason) override { lost = std::move(reason); }

  FlowLane* lane = nullptr;
  int eager_refusals = 0;
  std::set<uint64_t> late;  // keys of messages that are not sent yet
  std::map<uint64_t, uint64_t> late_adverts;
  uint64_t withdrawn = 0;
  std::vector<std::byte> source = std::vector<std::byte>(MAX_LOAN_BYTES, std::byte{0x42});
  std::vector<std::string> eager;
  std::vector<uint64_t> adverts, received, loans, sent;
  std::vector<const std::byte*> lent;
  std::string lost;
};

// Like a device's exposure: opening, closing and reading end when the test says so, in any order.
struct SlowExposure final : Exposure {
  uint64_t open(std::byte*, size_t) override { return opened++; }
  bool is_open(uint64_t region, flow::Keys& keys) override {
    keys = static_cast<uint32_t>(100 + region);
    return region < open_below;
  }
  void close(uint64_t region) override { closing.insert(region); }
  bool is_closed(uint64_t region) override { return closing.contains(region) && region < closed_below; }
  uint64_t open_source(const std::byte*, size_t) override { return sources_opened++; }
  bool is_source_closed(uint64_t source) override { return source < returned_below; }

  uint64_t opened = 0, sources_opened = 0;
  uint64_t open_below = UINT64_MAX, closed_below = UINT64_MAX, returned_below = UINT64_MAX;
  std::set<uint64_t> closing;
};

struct LanePair {
  explicit LanePair(std::shared_ptr<LoanMemory> shared = std::make_shared<LoanMemory>()) : memory(std::move(shared)) {
    const uint32_t link = network.add_link({.delay_us = 10, .loss_fraction = 0.02});
    const auto eager_address = [](auto& memory) { return reinterpret_cast<uint64_t>(memory.data()); };
    sender.lane = &a;
    receiver.lane = &b;
    a.flow().set_remote_eager(eager_address(memory_b), 2);
    b.flow().set_remote_eager(eager_address(memory_a), 1);
    network.connect(
        a.flow(), b.flow(), std::array{link}, std::array{link}, [this](uint64_t now_us) { a.pump(now_us); },
        [this](uint64_t now_us) { b.pump(now_us); });
  }
  void settle() {
    network.run(network.now_us() + 100'000, [] { return false; });
  }
  flow::FlowConfig config{.payload_max_bytes = 1'024, .window_bytes = 262'144};
  std::vector<std::byte> memory_a = std::vector<std::byte>(64 * 1'024), memory_b = memory_a;
  RecordingSink sender, receiver;
  SlowExposure exposure_a, exposure_b;
  const std::shared_ptr<LoanMemory> memory;
  LoanPool loans_a{exposure_a, memory}, loans_b{exposure_b, memory};
  FlowLane a{7, config, memory_a, 1, exposure_a, loans_a, sender};
  FlowLane b{7, config, memory_b, 2, exposure_b, loans_b, receiver};
  SimNetwork network{1};
};

}  // namespace

TEST_CASE("Loans beyond the pool wait in order and are granted as others are released") {
  LanePair pair;
  constexpr uint64_t WISHES = 20;
  for (uint64_t i = 0; i < WISHES; ++i) pair.b.advertise(1'000 + i, {i, 0, MAX_LOAN_BYTES}, nullptr);
  std::vector<std::byte> own(5'000);
  pair.b.advertise(5'000, {500, 0, own.size()}, own.data());  // has its own memory: needs no loan
  pair.settle();
  CHECK(pair.receiver.received.size() == FlowLane::LOAN_COUNT + 1);
  CHECK(own == std::vector<std::byte>(own.size(), std::byte{0x42}));
  size_t released = 0;
  while (pair.receiver.received.size() < WISHES + 1) {
    const size_t before = pair.receiver.received.size();
    for (; released < before; ++released) {
      if (pair.receiver.loans[released] != 0) {
        CHECK(pair.receiver.lent[released][MAX_LOAN_BYTES - 1] == std::byte{0x42});
      }
      CHECK(pair.b.release(pair.receiver.loans[released]));
    }
    pair.settle();
    REQUIRE(pair.receiver.received.size() > before);
  }
  std::vector<uint64_t> granted;
  for (const uint64_t key : pair.sender.adverts)
    if (key != 500) granted.push_back(key);
  CHECK(std::ranges::is_sorted(granted));
  CHECK(pair.sender.sent.size() == WISHES + 1);
  CHECK(std::set<uint64_t>(pair.receiver.received.begin(), pair.receiver.received.end()).size() == WISHES + 1);
  CHECK(pair.a.idle());
  CHECK(pair.b.idle());
}

TEST_CASE("Pools that have lent much refuse extra loans to every lane of the process, not its first ones") {
  SlowExposure exposure;
  const auto memory = std::make_shared<LoanMemory>();
  LoanPool pool(exposure, memory), other(exposure, memory);
  constexpr size_t MAX = LoanMemory::EXTRA_BELOW_BYTES / MAX_LOAN_BYTES;
  std::set<std::byte*> lent;
  for (size_t i = 0; i < MAX; ++i) lent.insert((i % 2 == 0 ? pool : other).take(true));
  CHECK(lent.size() == MAX);
  CHECK(lent.count(nullptr) == 0);
  for (LoanPool* one : {&pool, &other}) {
    CHECK(one->take(true) == nullptr);
    std::byte* const first = one->take(false);
    CHECK(first != nullptr);
    CHECK(lent.count(first) == 0);
    one->give_back(first);
    CHECK(one->take(true) == nullptr);  // the bound counts what is lent, and that is still MAX
  }
  CHECK(memory->lent_bytes() == LoanMemory::EXTRA_BELOW_BYTES);
  std::byte* const one_s = other.take(false);
  other.give_back(one_s);
  CHECK(pool.take(false) == one_s);  // what one group has given back, another one gets
}

TEST_CASE("A group that ends gives back what it had, and what nobody needs is bounded") {
  SlowExposure exposure;
  const auto memory = std::make_shared<LoanMemory>();
  for (int group = 0; group < 3; ++group) {
    LoanPool pool(exposure, memory);
    std::vector<std::byte*> lent;
    while (std::byte* const loan = pool.take(true)) lent.push_back(loan);
    CHECK(lent.size() * MAX_LOAN_BYTES == LoanMemory::EXTRA_BELOW_BYTES);
    for (int more = 0; more < 10; ++more) lent.push_back(pool.take(false));
    CHECK(memory->lent_bytes() == LoanMemory::EXTRA_BELOW_BYTES + 10 * MAX_LOAN_BYTES);
    if (group == 1)
      for (std::byte* loan : lent) pool.give_back(loan);
  }
  CHECK(memory->lent_bytes() == 0);
  CHECK(memory->free_bytes() == LoanMemory::EXTRA_BELOW_BYTES);
}

TEST_CASE("Memory that devices know stays with its port") {
  struct Device final : Exposure {
    uint64_t open(std::byte*, size_t) override { return 0; }
    bool is_open(uint64_t, flow::Keys&) override { return true; }
    void close(uint64_t) override {}
    bool is_closed(uint64_t) override { return true; }
    bool keep(std::byte* address, size_t) override { return known.insert(address).second; }
    uint64_t open_source(const std::byte*, size_t) override { return 0; }
    bool is_source_closed(uint64_t) override { return true; }
    std::set<std::byte*> known;
  } device;
  SlowExposure exposure;
  const auto memory = std::make_shared<LoanMemory>();
  LoanPool plain(exposure, memory);
  {
    LoanPool pool(device, memory);
    std::byte* const loan = pool.take(true);
    pool.give_back(loan);
    std::byte* const elsewhere = plain.take(true);
    CHECK(elsewhere != loan);
    CHECK(pool.take(true) == loan);
    CHECK(device.known.size() == 1);  // registered once
    CHECK(memory->lent_bytes() == 2 * MAX_LOAN_BYTES);
    plain.give_back(elsewhere);
  }
  CHECK(memory->lent_bytes() == 0);
  CHECK(memory->free_bytes() == MAX_LOAN_BYTES);
}

// The other group gives nothing back: only what the lane is sure of lets its receives end.
TEST_CASE("Groups that hold all extra loans do not keep another group from its own") {
  const auto memory = std::make_shared<LoanMemory>();
  SlowExposure hoarder_exposure;
  LoanPool hoarder(hoarder_exposure, memory);
  while (hoarder.take(true) != nullptr) {
  }
  LanePair pair(memory);
  constexpr uint64_t WISHES = 4 * FlowLane::LOAN_COUNT;
  for (uint64_t i = 0; i < WISHES; ++i) pair.b.advertise(i, {i, 0, MAX_LOAN_BYTES}, nullptr);
  size_t released = 0;
  while (released < WISHES) {
    pair.settle();
    const size_t received = pair.receiver.received.size();
    REQUIRE(received > released);
    CHECK(received - released <= FlowLane::OWN_LOAN_COUNT);
    for (; released < received; ++released) CHECK(pair.b.release(pair.receiver.loans[released]));
  }
  CHECK(pair.sender.sent.size() == WISHES);
}

TEST_CASE("Lanes of one port use the same memory one after the other") {
  LanePair pair;
  FlowLane other(8, pair.config, pair.memory_a, 3, pair.exposure_b, pair.loans_b, pair.receiver);
  for (uint64_t i = 0; i < FlowLane::LOAN_COUNT; ++i) pair.b.advertise(i, {i, 0, MAX_LOAN_BYTES}, nullptr);
  pair.settle();
  REQUIRE(pair.receiver.received.size() == FlowLane::LOAN_COUNT);
  for (const uint64_t loan : pair.receiver.loans) CHECK(pair.b.release(loan));
  CHECK(pair.memory->free_bytes() == FlowLane::LOAN_COUNT * MAX_LOAN_BYTES);
  for (uint64_t i = 0; i < 2 * FlowLane::LOAN_COUNT; ++i) other.advertise(i, {i, 0, MAX_LOAN_BYTES}, nullptr);
  CHECK(pair.memory->free_bytes() == 0);
  CHECK(pair.loans_b.taken_bytes() == FlowLane::LOAN_COUNT * MAX_LOAN_BYTES);
}

TEST_CASE("An eager message without room is offered again, in order, and a request carries no data") {
  LanePair pair;
  pair.receiver.eager_refusals = 3;
  REQUIRE(pair.a.send_eager({1, 0, 5}, EAGER_DATA, "first"));
  REQUIRE(pair.a.send_eager({2, 0, 1ull << 33}, EAGER_REQUEST, nullptr));
  REQUIRE(pair.a.send_eager({3, 0, 4}, EAGER_DATA, "last"));
  pair.settle();
  for (int round = 0; round < 5; ++round) pair.b.pump(pair.network.now_us());
  CHECK(pair.receiver.eager == std::vector<std::string>{"1:0:first", "2:1:", "3:0:last"});
}

TEST_CASE("A message of size zero needs no memory") {
  LanePair pair;
  pair.b.advertise(1, {1, 0, 0}, nullptr);
  pair.settle();
  CHECK(pair.receiver.received == std::vector<uint64_t>{1});
  CHECK(pair.receiver.loans == std::vector<uint64_t>{0});
  CHECK(pair.sender.sent == std::vector<uint64_t>{1});
  CHECK(pair.b.release(0));
}

TEST_CASE("An abort ends the peer's lane with its reason") {
  LanePair pair;
  std::vector<std::byte> own(500'000);
  pair.b.advertise(1, {1, 0, MAX_LOAN_BYTES}, own.data());
  pair.a.flow().abort("because");
  pair.settle();
  CHECK(pair.receiver.lost == "aborted: because");
}

TEST_CASE("The peer hears of memory once it is open, the sink of a message once its memory is closed") {
  LanePair pair;
  std::vector<std::byte> first(40'000), second(40'000);
  pair.exposure_b.open_below = pair.exposure_b.closed_below = 0;
  pair.exposure_a.returned_below = 0;
  pair.b.advertise(1, {1, 0, first.size()}, first.data());
  pair.b.advertise(2, {2, 0, second.size()}, second.data());
  pair.settle();
  CHECK(pair.sender.adverts.empty());

  pair.exposure_b.open_below = 1;
  pair.b.pump(pair.network.now_us());
  pair.settle();
  CHECK(pair.sender.adverts == std::vector<uint64_t>{1});
  CHECK(first == std::vector<std::byte>(first.size(), std::byte{0x42}));
  CHECK(pair.exposure_b.closing == std::set<uint64_t>{0});
  CHECK(pair.receiver.received.empty());
  CHECK(pair.sender.sent.empty());
  CHECK_FALSE(pair.a.idle());

  pair.exposure_b.open_below = 2;
  pair.b.pump(pair.network.now_us());
  pair.settle();
  CHECK(pair.exposure_b.closing == std::set<uint64_t>{0, 1});
  CHECK(pair.receiver.received.empty());

  pair.exposure_b.closed_below = 2;
  pair.b.pump(pair.network.now_us());
  CHECK(pair.receiver.received == std::vector<uint64_t>{1, 2});
  pair.exposure_a.returned_below = 1;
  pair.a.pump(pair.network.now_us());
  CHECK(pair.sender.sent == std::vector<uint64_t>{1});
  pair.exposure_a.returned_below = 2;
  pair.a.pump(pair.network.now_us());
  CHECK(pair.sender.sent == std::vector<uint64_t>{1, 2});
  CHECK(pair.a.idle());
}

TEST_CASE("A peer that leaves while a device still reads what it has acknowledged is not lost") {
  LanePair pair;
  pair.exposure_a.returned_below = 0;
  std::vector<std::byte> memory(5'000);
  pair.b.advertise(10, {1, 0, memory.size()}, memory.data());
  pair.settle();
  REQUIRE(pair.receiver.received == std::vector<uint64_t>{10});
  pair.b.flow().close();
  pair.settle();
  for (int beat = 0; beat < 3; ++beat) {
    pair.a.expect(pair.network.now_us());
    pair.settle();
  }
  CHECK(pair.sender.lost == "");
  CHECK(pair.sender.sent.empty());
  pair.exposure_a.returned_below = UINT64_MAX;
  pair.settle();
  CHECK(pair.sender.sent == std::vector<uint64_t>{1});
  // Whoever waits for more waits for the peer.
  for (int beat = 0; beat < 3; ++beat) {
    pair.a.expect(pair.network.now_us());
    pair.settle();
  }
  CHECK(pair.sender.lost == "left the group");
}

TEST_CASE("After an abort the sink hears of no message, whatever is closed later") {
  LanePair pair;
  std::vector<std::byte> own(40'000);
  pair.exposure_b.closed_below = 0;
  pair.exposure_a.returned_below = 0;
  pair.b.advertise(1, {1, 0, own.size()}, own.data());
  pair.settle();
  REQUIRE(pair.exposure_b.closing.size() == 1);
  pair.b.abort("enough");
  pair.a.abort("enough");
  pair.exposure_b.closed_below = pair.exposure_a.returned_below = UINT64_MAX;
  pair.settle();
  CHECK(pair.receiver.received.empty());
  CHECK(pair.sender.sent.empty());
}

// Credits have numbers, and only so many are open from the oldest incomplete one on.
TEST_CASE("Messages that their sender asked for pass any that it gets to late") {
  for (const uint64_t late_count : {1, 200, 400}) {
    CAPTURE(late_count);
    LanePair pair;
    constexpr uint64_t SIZE_BYTES = 3'000, ASKED = 600;
    // Every fourth is a loan.
    std::vector<std::vector<std::byte>> late(late_count, std::vector<std::byte>(SIZE_BYTES));
    for (uint64_t key = 0; key < late_count; ++key) {
      pair.sender.late.insert(key);
      pair.b.advertise(key, {key, 0, SIZE_BYTES}, key % 4 == 3 ? nullptr : late[key].data());
    }
    std::vector<std::byte> asked(ASKED * SIZE_BYTES);
    for (uint64_t tag = 0; tag < ASKED; ++tag)
      pair.b.advertise(1'000 + tag, {P2P_KEY | tag, 0, SIZE_BYTES}, asked.data() + tag * SIZE_BYTES);
    for (int turn = 0; turn < 20 && pair.receiver.received.size() < ASKED; ++turn) pair.settle();
    CHECK(pair.receiver.received.size() == ASKED);
    CHECK(asked == std::vector<std::byte>(asked.size(), std::byte{0x42}));
    CHECK(pair.sender.withdrawn != 0);
    CHECK(pair.sender.sent.size() == ASKED);
    CHECK(late == std::vector<std::vector<std::byte>>(late_count, std::vector<std::byte>(SIZE_BYTES)));
    // All late ones are advertised again, or wait for a credit or a loan.
    pair.sender.send_late(SIZE_BYTES);
    for (size_t released = ASKED, turn = 0; turn < 200 && released < ASKED + late_count; ++turn) {
      pair.settle();
      for (; released < pair.receiver.received.size(); ++released) CHECK(pair.b.release(pair.receiver.loans[released]));
    }
    CHECK(pair.receiver.received.size() == ASKED + late_count);
    CHECK(std::set<uint64_t>(pair.receiver.received.begin(), pair.receiver.received.end()).size() ==
          ASKED + late_count);
    for (uint64_t key = 0; key < late_count; ++key)
      CHECK(late[key] == std::vector<std::byte>(SIZE_BYTES, key % 4 == 3 ? std::byte{} : std::byte{0x42}));
    CHECK(pair.a.idle());
    CHECK(pair.b.idle());
    CHECK(pair.sender.lost.empty());
  }
}

TEST_CASE("No credit goes back while no message that was asked for waits") {
  LanePair pair;
  std::vector<std::byte> memory(3'000);
  for (uint64_t key = 0; key < 400; ++key) {
    pair.sender.late.insert(key);
    pair.b.advertise(key, {key, 0, memory.size()}, memory.data());
  }
  pair.settle();
  CHECK(pair.sender.late_adverts.size() == 256);
  CHECK(pair.sender.withdrawn == 0);
}
