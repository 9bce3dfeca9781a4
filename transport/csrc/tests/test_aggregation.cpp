// SPDX-License-Identifier: Apache-2.0
// The store of an aggregator: ranks over a network that loses, repeats and reorders get the sums of their own tree.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../../../ebpf/include/float_sum.h"
#include "aggregation/store.hpp"

using namespace sennit;
using namespace sennit::aggregation;

namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

struct Memory {
  explicit Memory(size_t size_bytes = Store::MEMORY_MIN_BYTES) : lines(size_bytes / 64), size(size_bytes) {}
  std::span<std::byte> bytes() { return {reinterpret_cast<std::byte*>(lines.data()), size}; }
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> lines;
  size_t size;
};

Endpoint endpoint(uint16_t port) {
  Endpoint found{};
  found.family = 4;
  found.port = port;
  return found;
}

Bytes packet(Header header, std::span<const std::byte> elements = {}) {
  header.stripes = static_cast<uint8_t>(elements.size() / AGGREGATION_STRIPE_BYTES);
  Bytes bytes(header.packet_bytes());
  if (!elements.empty()) std::memcpy(bytes.data() + HEADER_BYTES, elements.data(), elements.size());
  write_header(bytes.data(), header);
  return bytes;
}

Bytes join(uint64_t key, uint16_t leaf, uint16_t leaves, uint16_t window) {
  Bytes stripe(AGGREGATION_STRIPE_BYTES);
  wire::store_be16(stripe.data(), leaves);
  wire::store_be16(stripe.data() + 2, window);
  return packet({.kind = AGGREGATION_JOIN, .key = key, .leaf = leaf}, stripe);
}

struct Received {
  Header header;
  Bytes elements;
  uint16_t port;
};

std::vector<Received> received(const Answers& answers) {
  std::vector<Received> found;
  for (const auto& answer : answers.all()) {
    const auto bytes = answers.bytes_of(answer);
    Received one;
    REQUIRE(read_packet(bytes, one.header) == Refusal::none);
    one.elements.assign(bytes.begin() + HEADER_BYTES, bytes.end());
    one.port = answer.to.port;
    found.push_back(one);
  }
  return found;
}

struct Taken {
  aggregation_verdict verdict;
  std::vector<Received> answers;
};

Taken take(Store& store, const Bytes& bytes, uint16_t port = 1) {
  Answers answers;
  const aggregation_verdict verdict = store.take(bytes, endpoint(port), answers);
  return {verdict, received(answers)};
}

uint16_t reason_of(const Received& answer) {
  CHECK(answer.header.kind == AGGREGATION_REFUSED);
  return wire::load_be16(answer.elements.data());
}

uint32_t window_of(const Received& answer) {
  CHECK(answer.header.kind == AGGREGATION_JOINED);
  return wire::load_be16(answer.elements.data() + 2);
}

template <class Number, class Sum>
Bytes tree_sum(std::vector<Bytes> leaves, Sum sum) {
  // Neighbours in each round are the halves of a node. What has no neighbour goes up alone.
  while (leaves.size() > 1) {
    std::vector<Bytes> above;
    for (size_t n = 0; n < leaves.size(); n += 2) {
      Bytes node = leaves[n];
      if (n + 1 < leaves.size())
        for (size_t at = 0; at < node.size(); at += sizeof(Number)) {
          Number left, right;
          std::memcpy(&left, node.data() + at, sizeof left);
          std::memcpy(&right, leaves[n + 1].data() + at, sizeof right);
          left = sum(left, right);
          std::memcpy(node.data() + at, &left, sizeof left);
        }
      above.push_back(std::move(node));
    }
    leaves = std::move(above);
  }
  return leaves[0];
}

Bytes reference(const std::vector<Bytes>& leaves, uint8_t arithmetic) {
  if (arithmetic == AGGREGATION_SUM_F32) return tree_sum<uint32_t>(leaves, float_sum);
  if (arithmetic == AGGREGATION_SUM_I32)
    return tree_sum<uint32_t>(leaves, [](uint32_t a, uint32_t b) { return a + b; });
  std::vector<Bytes> wide;
  for (const Bytes& leaf : leaves) {
    Bytes floats(2 * leaf.size());
    for (size_t at = 0; at < leaf.size(); at += 2) std::memcpy(floats.data() + 2 * at + 2, leaf.data() + at, 2);
    wide.push_back(std::move(floats));
  }
  const Bytes sums = tree_sum<uint32_t>(wide, float_sum);
  Bytes narrow(leaves[0].size());
  for (size_t at = 0; at < narrow.size(); at += 2) {
    uint32_t bits;
    std::memcpy(&bits, sums.data() + 2 * at, sizeof bits);
    const uint16_t rounded = bfloat_of(bits);
    std::memcpy(narrow.data() + at, &rounded, sizeof rounded);
  }
  return narrow;
}

// Random elements without NaN, whose bits are unspecified in sums. Infinities would make some.
Bytes elements(Random& random, uint8_t arithmetic, size_t size_bytes) {
  Bytes bytes(size_bytes);
  for (size_t at = 0; at < size_bytes; at += 2) {
    auto half = static_cast<uint16_t>(random());
    const bool is_top = arithmetic == AGGREGATION_SUM_BF16 || at % 4 == 2;
    // Below 2^64, so that 64 of them stay finite.
    if (arithmetic != AGGREGATION_SUM_I32 && is_top)
      half = static_cast<uint16_t>((half & 0x807f) | (half >> 7 & 0xff) % 190 << 7);
    std::memcpy(bytes.data() + at, &half, sizeof half);
  }
  return bytes;
}

// One job: what its ranks send and have got.
class Job {
 public:
  Job(uint64_t key, uint16_t leaves, uint64_t blocks, uint16_t first_port, Random& random)
      : key_(key), first_port_(first_port), blocks_(blocks), ranks_(leaves) {
    for (uint64_t block = 0; block < blocks; ++block) {
      const auto arithmetic = static_cast<uint8_t>(random() % 3);
      const size_t size_bytes = AGGREGATION_STRIPE_BYTES * (1 + random() % AGGREGATION_STRIPES_MAX);
      arithmetics_.push_back(arithmetic);
      std::vector<Bytes> given;
      for (uint16_t rank = 0; rank < leaves; ++rank) given.push_back(elements(random, arithmetic, size_bytes));
      sums_.push_back(reference(given, arithmetic));
      given_.push_back(std::move(given));
    }
  }

  uint16_t port(size_t rank) const { return static_cast<uint16_t>(first_port_ + rank); }
  bool has(uint16_t port) const { return port >= first_port_ && port < first_port_ + ranks_.size(); }
  bool is_done() const {
    return std::ranges::all_of(ranks_, [this](const Rank& rank) { return rank.sums == blocks_; });
  }

  // A packet of a random rank: a new leaf, or one that it has sent already.
  std::pair<uint16_t, Bytes> any_packet(Random& random) {
    const auto number = static_cast<uint16_t>(random() % ranks_.size());
    Rank& rank = ranks_[number];
    if (rank.job == 0) return {port(number), join(key_, number, static_cast<uint16_t>(ranks_.size()), 8)};
    uint64_t block = rank.first + random() % rank.window;
    if (block >= blocks_) block = blocks_ - 1;
    return {port(number), leaf(number, block)};
  }

  Bytes leaf(uint16_t rank, uint64_t block) const {
    return packet({.job = ranks_[rank].job,
                   .key = key_,
                   .block = block,
                   .mark = static_cast<uint32_t>(block * 7),
                   .leaf = rank,
                   .arithmetic = arithmetics_[block]},
                  given_[block][rank]);
  }

  void got(const Received& answer) {
    Rank& rank = ranks_[answer.port - first_port_];
    CHECK(answer.header.key == key_);
    if (answer.header.kind == AGGREGATION_JOINED) {
      rank.job = answer.header.job;
      rank.window = window_of(answer);
    } else if (answer.header.kind == AGGREGATION_RESULT) {
      const uint64_t block = answer.header.block;
      REQUIRE(block < blocks_);
      CHECK(answer.elements == sums_[block]);
      if (block >= rank.first && rank.got.emplace(block, true).second) ++rank.sums;
      while (rank.got.contains(rank.first)) ++rank.first;
    } else {
      CHECK(answer.header.kind == AGGREGATION_WAITING);
    }
  }

 private:
  struct Rank {
    uint32_t job = 0, window = 0;
    uint64_t first = 0;  // the first block whose sum it lacks
    uint64_t sums = 0;
    std::map<uint64_t, bool> got;
  };
  uint64_t key_;
  uint16_t first_port_;
  uint64_t blocks_;
  std::vector<Rank> ranks_;
  std::vector<uint8_t> arithmetics_;
  std::vector<std::vector<Bytes>> given_;
  std::vector<Bytes> sums_;
};

// Joins all ranks of a job of two. Returns its number.
uint32_t join_two(Store& store, uint64_t key, uint16_t window = 8) {
  take(store, join(key, 0, 2, window), 10);
  return take(store, join(key, 1, 2, window), 11).answers.at(0).header.job;
}

Header leaf_header(uint32_t job, uint64_t key, uint64_t block, uint16_t leaf) {
  return {.job = job, .key = key, .block = block, .mark = 3, .leaf = leaf};
}

}  // namespace

TEST_CASE("over loss, repetition and reordering all ranks of two jobs get the sums of their trees") {
  for (const uint64_t seed : {1u, 2u, 3u, 4u, 5u, 6u}) {
    Random random(seed);
    CAPTURE(seed);
    Memory memory;
    Store store(memory.bytes());
    const auto leaves = [&random] { return static_cast<uint16_t>(2 + random() % 8); };
    std::vector<Job> jobs;
    jobs.emplace_back(100, leaves(), 60, uint16_t{1000}, random);
    jobs.emplace_back(200, leaves(), 60, uint16_t{2000}, random);
    std::vector<std::pair<uint16_t, Bytes>> to_store, astray;
    std::vector<Received> to_ranks;
    int rounds = 0;
    while (!std::ranges::all_of(jobs, &Job::is_done)) {
      REQUIRE(++rounds < 200'000);
      to_store.push_back(jobs[random() % 2].any_packet(random));
      // Any packet on the way may be next, be lost, and be there twice.
      while (to_store.size() > random() % 40) {
        std::swap(to_store[random() % to_store.size()], to_store.back());
        const auto next = to_store.back();
        if (random() % 8 != 0) to_store.pop_back();
        if (random() % 10 == 0) continue;
        // Some come once more when others have their slot.
        if (random() % 16 == 0) astray.push_back(next);
        if (!astray.empty() && random() % 16 == 0) to_store.push_back(astray[random() % astray.size()]);
        for (Received& answer : take(store, next.second, next.first).answers) to_ranks.push_back(std::move(answer));
      }
      while (to_ranks.size() > random() % 40) {
        std::swap(to_ranks[random() % to_ranks.size()], to_ranks.back());
        const Received answer = to_ranks.back();
        if (random() % 8 != 0) to_ranks.pop_back();
        if (random() % 10 == 0) continue;
        for (Job& job : jobs)
          if (job.has(answer.port)) job.got(answer);
      }
    }
    const aggregation_counters& counted = store.counters();
    CHECK(counted.completed == 120);
    CHECK(counted.repeated > 0);
    CHECK(counted.repeated_late > 0);
    CHECK(counted.stale > 0);
  }
}

TEST_CASE("trees of 2 to 64 leaves") {
  Random random(7);
  for (const uint16_t leaves : {2, 3, 5, 7, 8, 11, 33, 63, 64}) {
    Memory memory;
    Store store(memory.bytes());
    Job job(9, leaves, 3, 100, random);
    for (uint16_t rank = 0; rank < leaves; ++rank)
      job.got(take(store, join(9, rank, leaves, 4), job.port(rank)).answers.at(0));
    for (uint64_t block = 0; block < 3; ++block)
      for (uint16_t rank = 0; rank < leaves; ++rank) {
        const Taken taken = take(store, job.leaf(rank, block), job.port(rank));
        CHECK(taken.answers.size() == (rank + 1 == leaves ? leaves : 0));
        for (const Received& answer : taken.answers) job.got(answer);
      }
    CHECK(job.is_done());
  }
}

TEST_CASE("a join twice is one job, and the window is a power of two") {
  Memory memory;
  Store store(memory.bytes());
  const Taken first = take(store, join(5, 0, 4, 100));
  CHECK(first.verdict == AGGREGATION_VERDICT_JOINED);
  CHECK(window_of(first.answers.at(0)) == 64);
  const Taken again = take(store, join(5, 1, 4, 8));
  CHECK(again.answers.at(0).header.job == first.answers[0].header.job);
  CHECK(window_of(again.answers[0]) == 64);
  CHECK(store.jobs().size() == 1);
  CHECK(reason_of(take(store, join(5, 0, 3, 8)).answers.at(0)) == AGGREGATION_OTHER_JOB);
}

TEST_CASE("a repeated leaf hears that it waits, or the sum") {
  Memory memory;
  Store store(memory.bytes());
  const uint32_t job = join_two(store, 5);
  const Bytes one(32, std::byte{1});
  CHECK(take(store, packet(leaf_header(job, 5, 0, 0), one), 10).answers.empty());
  const Taken waits = take(store, packet(leaf_header(job, 5, 0, 0), one), 10);
  CHECK(waits.verdict == AGGREGATION_VERDICT_REPEATED);
  CHECK(waits.answers.at(0).header.kind == AGGREGATION_WAITING);
  CHECK(waits.answers[0].header.block == 0);
  // Rank 0 has moved to another port since.
  take(store, packet(leaf_header(job, 5, 0, 0), one), 12);
  const Taken complete = take(store, packet(leaf_header(job, 5, 0, 1), one), 11);
  REQUIRE(complete.answers.size() == 2);
  CHECK(complete.answers[0].port == 12);
  CHECK(complete.answers[1].port == 11);
  const Taken late = take(store, packet(leaf_header(job, 5, 0, 0), one), 10);
  CHECK(late.verdict == AGGREGATION_VERDICT_REPEATED_LATE);
  REQUIRE(late.answers.size() == 1);
  CHECK(late.answers[0].port == 10);
  CHECK(late.answers[0].elements == complete.answers[0].elements);
}

TEST_CASE("what disagrees with the leaves before it is refused by name") {
  Memory memory;
  Store store(memory.bytes());
  const uint32_t job = join_two(store, 5);
  const Bytes one(32, std::byte{1}), two(64, std::byte{1});
  take(store, packet(leaf_header(job, 5, 0, 0), one));
  Header mark = leaf_header(job, 5, 0, 1), arithmetic = mark;
  mark.mark = 4;
  arithmetic.arithmetic = AGGREGATION_SUM_I32;
  for (const Bytes& other : {packet(mark, one), packet(arithmetic, one), packet(leaf_header(job, 5, 0, 1), two)})
    CHECK(reason_of(take(store, other).answers.at(0)) == AGGREGATION_OTHER_PLAN);
  CHECK(reason_of(take(store, packet(leaf_header(job + 1, 5, 0, 1), one)).answers.at(0)) == AGGREGATION_UNKNOWN_JOB);
  CHECK(reason_of(take(store, packet(leaf_header(job, 6, 0, 1), one)).answers.at(0)) == AGGREGATION_UNKNOWN_JOB);
  CHECK(store.counters().other_plan == 3);
  CHECK(store.counters().unknown_job == 2);
  // The block is as it was.
  CHECK(take(store, packet(leaf_header(job, 5, 0, 1), one)).verdict == AGGREGATION_VERDICT_COMPLETED);
}

TEST_CASE("a newer block takes the slot, an older one is dropped") {
  Memory memory;
  Store store(memory.bytes());
  const uint32_t job = join_two(store, 5, 4);
  const Bytes one(32, std::byte{1});
  take(store, packet(leaf_header(job, 5, 3, 0), one));
  CHECK(take(store, packet(leaf_header(job, 5, 11, 0), one)).verdict == AGGREGATION_VERDICT_STORED);
  const Taken old = take(store, packet(leaf_header(job, 5, 3, 1), one));
  CHECK(old.verdict == AGGREGATION_VERDICT_STALE);
  CHECK(old.answers.empty());
  CHECK(take(store, packet(leaf_header(job, 5, 11, 1), one)).verdict == AGGREGATION_VERDICT_COMPLETED);
}

TEST_CASE("a job ends when all ranks have left, and its number is not valid for the next one") {
  Memory memory;
  Store store(memory.bytes());
  const uint32_t job = join_two(store, 5);
  const Bytes one(32, std::byte{1});
  take(store, packet(leaf_header(job, 5, 0, 0), one));
  CHECK(take(store, packet({.kind = AGGREGATION_LEAVE, .job = job, .key = 5, .leaf = 0})).answers.empty());
  CHECK(store.jobs().size() == 1);
  CHECK(take(store, packet({.kind = AGGREGATION_LEAVE, .job = job, .key = 6, .leaf = 1})).answers.empty());
  CHECK(store.jobs().size() == 1);
  take(store, packet({.kind = AGGREGATION_LEAVE, .job = job, .key = 5, .leaf = 1}));
  CHECK(store.jobs().empty());
  const uint32_t next = join_two(store, 5);
  CHECK(next != job);
  CHECK(reason_of(take(store, packet(leaf_header(job, 5, 0, 1), one)).answers.at(0)) == AGGREGATION_UNKNOWN_JOB);
  // Nothing is left of the leaf of the other job.
  CHECK(take(store, packet(leaf_header(next, 5, 0, 1), one)).verdict == AGGREGATION_VERDICT_STORED);
}

TEST_CASE("jobs beyond the room: a smaller window, then a refusal, then the place of an idle job") {
  Memory memory;
  Store store(memory.bytes());
  // 4 MiB are some 2,600 cells.
  CHECK(window_of(take(store, join(1, 0, 8, 128)).answers.at(0)) == 128);
  CHECK(window_of(take(store, join(2, 0, 8, 128)).answers.at(0)) == 16);
  CHECK(reason_of(take(store, join(3, 0, 64, 64)).answers.at(0)) == AGGREGATION_NO_ROOM);
  CHECK(store.counters().no_room == 1);
  for (uint32_t n = 0; n <= Store::IDLE_S; ++n) {
    store.second_passed();
    take(store, join(2, 0, 8, 128));
  }
  // The idle job alone has gone.
  CHECK(window_of(take(store, join(3, 0, 8, 128)).answers.at(0)) == 128);
  std::vector<uint32_t> idle;
  for (const Store::Job& job : store.jobs()) idle.push_back(job.idle_s);
  CHECK(idle.size() == 2);
  CHECK(std::ranges::max(idle) <= 1);
}

TEST_CASE("no more jobs than there are places") {
  Memory memory(32 << 20);
  Store store(memory.bytes());
  for (uint64_t key = 1; key <= AGGREGATION_JOBS_MAX; ++key)
    CHECK(take(store, join(key, 0, 2, 16)).verdict == AGGREGATION_VERDICT_JOINED);
  CHECK(take(store, join(1'000, 0, 2, 16)).verdict == AGGREGATION_VERDICT_NO_ROOM);
}

TEST_CASE("a flood of forged leaves is answered up to a number, and counted whole") {
  Memory memory;
  Store store(memory.bytes());
  join_two(store, 5);
  const Bytes forged = packet(leaf_header(64, 6, 0, 0), Bytes(32));
  uint32_t answers = 0;
  for (uint32_t n = 0; n < Store::REFUSALS_MAX + 9; ++n) answers += take(store, forged).answers.size();
  CHECK(answers == Store::REFUSALS_MAX);
  CHECK(store.counters().unknown_job == Store::REFUSALS_MAX + 9);
  store.second_passed();
  CHECK(take(store, forged).answers.size() == 1);
}

TEST_CASE("each kind of junk is dropped under its name") {
  Memory memory;
  Store store(memory.bytes());
  const uint32_t job = join_two(store, 5);
  const Bytes one(32, std::byte{1});
  const Bytes good = packet(leaf_header(job, 5, 0, 0), one);
  const auto changed = [&good](size_t at, std::byte value) {
    Bytes bytes = good;
    bytes[at] = value;
    return bytes;
  };
  Bytes longer = good;
  longer.push_back({});
  Header kind = leaf_header(job, 5, 0, 0);
  kind.kind = AGGREGATION_RESULT;
  const std::vector<std::pair<Bytes, aggregation_verdict>> junk = {
      {{}, AGGREGATION_VERDICT_TRUNCATED},
      {Bytes(good.begin(), good.end() - 1), AGGREGATION_VERDICT_TRUNCATED},
      {longer, AGGREGATION_VERDICT_MALFORMED},
      {changed(0, std::byte{0}), AGGREGATION_VERDICT_FOREIGN},
      {changed(2, std::byte{2}), AGGREGATION_VERDICT_WRONG_VERSION},
      {changed(3, std::byte{7}), AGGREGATION_VERDICT_MALFORMED},
      {changed(30, std::byte{3}), AGGREGATION_VERDICT_MALFORMED},
      {changed(8, std::byte{1}), AGGREGATION_VERDICT_CORRUPT},
      {changed(50, std::byte{2}), AGGREGATION_VERDICT_CORRUPT},
      {packet(kind, one), AGGREGATION_VERDICT_UNEXPECTED},
      {packet(leaf_header(job, 5, 0, 2), one), AGGREGATION_VERDICT_MALFORMED},
      {packet(leaf_header(job, 5, 0, 0)), AGGREGATION_VERDICT_MALFORMED},
      {packet({.kind = AGGREGATION_JOIN, .key = 8}), AGGREGATION_VERDICT_MALFORMED},
      {join(8, 0, 1, 4), AGGREGATION_VERDICT_MALFORMED},
      {join(8, 0, 65, 4), AGGREGATION_VERDICT_MALFORMED},
      {join(8, 4, 4, 4), AGGREGATION_VERDICT_MALFORMED},
      {join(8, 0, 4, 0), AGGREGATION_VERDICT_MALFORMED},
  };
  for (size_t n = 0; n < junk.size(); ++n) {
    CAPTURE(n);
    const Taken taken = take(store, junk[n].first);
    CHECK(taken.verdict == junk[n].second);
    CHECK(taken.answers.empty());
  }
  CHECK(take(store, good).verdict == AGGREGATION_VERDICT_STORED);
}

TEST_CASE("no answer to a single packet is longer than the packet, unless the job is complete") {
  Memory memory;
  Store store(memory.bytes());
  const uint32_t job = join_two(store, 5);
  const Bytes one(32, std::byte{1});
  const std::vector<Bytes> packets = {join(9, 0, 2, 4), packet(leaf_header(7, 7, 0, 0), one),
                                      packet({.kind = AGGREGATION_LEAVE, .job = 7, .key = 7}),
                                      packet(leaf_header(job, 5, 0, 0), one), packet(leaf_header(job, 5, 0, 0), one)};
  for (const Bytes& bytes : packets) {
    Answers answers;
    store.take(bytes, endpoint(1), answers);
    CHECK(answers.all().size() <= 1);
    for (const auto& answer : answers.all()) CHECK(answer.size_bytes <= bytes.size());
  }
}

TEST_CASE("memory that is too small is refused") {
  Memory memory(1 << 20);
  CHECK_THROWS_WITH(Store{memory.bytes()}, "memory of 1048576 bytes; allowed: 4194304 or more");
}
