// SPDX-License-Identifier: Apache-2.0
// The verdicts on datagrams, and batches that one thread fills while another one reads them.
#include <doctest/doctest.h>

#include <chrono>
#include <random>
#include <thread>

#include "batch.hpp"
#include "packets.hpp"
#include "receiver.hpp"

using namespace sennit::offload;

namespace {

constexpr std::uint32_t ROWS = 16, SLOTS = 2;
constexpr Session SESSION{.schema_id = 7, .id = 9};
constexpr std::chrono::seconds DEADLINE(60);

Verdict verdict_of(Receiver& receiver, const Bytes& datagram) {
  const FeedCounters before = receiver.counters();
  const Receiver::Datagram one(datagram);
  receiver.take({&one, 1});
  const FeedCounters after = receiver.counters();
  int found = -1;
  for (std::size_t n = 0; n < VERDICTS; n++)
    if (after.datagrams[n] != before.datagrams[n]) {
      REQUIRE(found == -1);
      found = static_cast<int>(n);
    }
  REQUIRE(found >= 0);
  return static_cast<Verdict>(found);
}

}  // namespace

TEST_CASE("each datagram has the verdict that comes first") {
  Receiver receiver(big_endian_schema(), {}, SESSION, ROWS, SLOTS);
  const Bytes body = record(1, 2);
  const auto verdict = [&](const Header& header) { return verdict_of(receiver, packet(header, body)); };
  CHECK(verdict({.magic = 1, .version = 3}) == Verdict::foreign);
  CHECK(verdict({.version = 3, .schema_id = 1}) == Verdict::wrong_version);
  CHECK(verdict({.schema_id = 1, .session = 1}) == Verdict::wrong_schema);
  CHECK(verdict({.session = 1}) == Verdict::wrong_session);
  CHECK(verdict({.flags = 1, .batch = 5}) == Verdict::malformed);
  CHECK(verdict({.records = 0}) == Verdict::malformed);
  CHECK(verdict({.row = ROWS, .records = 1}) == Verdict::malformed);
  CHECK(verdict({.row = 0xffff'ffff, .records = 1}) == Verdict::malformed);
  CHECK(verdict({.row = 1, .records = ROWS}) == Verdict::malformed);
  CHECK(verdict({.batch = SLOTS}) == Verdict::no_credit);
  CHECK(verdict({.batch = 0xffff'ffff}) == Verdict::duplicate);
  CHECK(verdict({.row = 3}) == Verdict::out_of_sequence);
  CHECK(verdict({.row = 2}) == Verdict::out_of_sequence);
  CHECK(receiver.row_ahead(0) == 3);
  CHECK(verdict({.records = 2}) == Verdict::malformed);
  CHECK(receiver.row_ahead(0) == 3);
  CHECK(verdict({}) == Verdict::accepted);
  CHECK(receiver.row_ahead(0) == 0);
  CHECK(verdict({}) == Verdict::duplicate);
  CHECK(receiver.rows_taken(0) == 1);
  CHECK(receiver.rows_taken(SLOTS) == 0);
  receiver.release(0);
  CHECK(verdict({.row = 1}) == Verdict::duplicate);
  CHECK(verdict({.batch = SLOTS}) == Verdict::accepted);
  CHECK(receiver.counters().records == 2);
  CHECK(receiver.counters().body_bytes == 2 * body.size());
}

TEST_CASE("a datagram cut or lengthened at every byte changes nothing") {
  Receiver receiver(big_endian_schema(), {}, SESSION, ROWS, SLOTS);
  const Bytes good = packet({.records = 2}, joined({record(1, 2), record(2, 0)}));
  for (std::size_t size = 0; size < good.size(); size++)
    CHECK(verdict_of(receiver, Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size))) ==
          Verdict::truncated);
  Bytes longer = good;
  longer.push_back(0);
  CHECK(verdict_of(receiver, longer) == Verdict::oversized);
  CHECK(receiver.content(0).rows == 0);
  CHECK(verdict_of(receiver, good) == Verdict::accepted);
  CHECK(receiver.content(0).rows == 2);
}

TEST_CASE("a datagram with any bit changed changes nothing") {
  Receiver receiver(big_endian_schema(), {}, SESSION, ROWS, SLOTS);
  const Bytes good = packet({.records = 2}, joined({record(1, 2), record(2, 0)}));
  for (std::size_t bit = 0; bit < 8 * good.size(); bit++) {
    Bytes broken = good;
    broken[bit / 8] ^= static_cast<std::uint8_t>(1U << bit % 8);
    const Verdict verdict = verdict_of(receiver, broken);
    // What the fields before the checksum decide is decided by them: magic, version, schema, session and size.
    const bool is_corrupt = (bit / 8 > 11 || bit / 8 == 3) && bit / 8 != 22 && bit / 8 != 23;
    CHECK((verdict == Verdict::corrupt) == is_corrupt);
  }
  CHECK(receiver.row_ahead(0) == 0);
  CHECK(receiver.content(0).rows == 0);
  CHECK(verdict_of(receiver, good) == Verdict::accepted);
}

TEST_CASE("random bytes behind a good header never fill more than a batch") {
  Receiver receiver(big_endian_schema(), {}, SESSION, ROWS, SLOTS);
  std::mt19937 random(5);
  for (int round = 0; round < 20'000; round++) {
    Bytes body(random() % 90);
    for (auto& byte : body) byte = random() % 4 == 0 ? 0 : static_cast<std::uint8_t>(random());
    const Bytes datagram = packet({.batch = static_cast<std::uint32_t>(random() % 3),
                                   .row = static_cast<std::uint32_t>(random() % (ROWS + 2)),
                                   .records = static_cast<std::uint16_t>(random() % 4)},
                                  body);
    const Receiver::Datagram one(datagram);
    receiver.take({&one, 1});
    CHECK(receiver.rows_taken(0) <= ROWS);
  }
}

TEST_CASE("a batch is made of what has come, and outlives its slot") {
  Receiver receiver(big_endian_schema(), {}, SESSION, ROWS, SLOTS);
  REQUIRE(verdict_of(receiver, packet({.records = 2}, joined({record(1, 2), record(2, 0)}))) == Verdict::accepted);
  Program program;
  for (const bool is_dense : {true, true, false, false, false})
    is_dense ? program.dense_source() : program.ids_source();
  const std::size_t first = program.add(2, first_x, 1);
  const Batch batch = make_batch(receiver, 0, program, {1, 0, 1}, {first, 3});
  receiver.release(0);
  REQUIRE(verdict_of(receiver, packet({.batch = SLOTS}, record(99, 1))) == Verdict::accepted);
  CHECK(batch.rows == 2);
  CHECK(std::vector<float>(batch.dense->begin(), batch.dense->begin() + 6) ==
        std::vector<float>{-2.0F, 1.5F, -2.0F, -2.0F, 1.5F, -2.0F});
  CHECK(std::vector<std::int32_t>(batch.lengths->begin(), batch.lengths->begin() + 4) ==
        std::vector<std::int32_t>{1, 1, 2, 0});
  CHECK((*batch.values[0].ids)[1] == 2);
  CHECK(batch.values[1].count == 2);
  CHECK((*batch.values[1].ids)[1] == 255);
  CHECK_THROWS_AS(make_batch(receiver, 0, program, {first}, {}), std::invalid_argument);
  CHECK_THROWS_AS(make_batch(receiver, 0, program, {}, {99}), std::invalid_argument);
  CHECK_THROWS_AS(make_batch(receiver, 0, Program(), {}, {}), std::invalid_argument);
}

TEST_CASE("rows that are taken are complete, for a reader beside the one who fills") {
  Receiver receiver(big_endian_schema(), {}, SESSION, ROWS, SLOTS);
  constexpr std::uint32_t BATCHES = 400;
  std::thread filler([&] {
    for (std::uint32_t number = 0; number < BATCHES * ROWS; number++) {
      const Bytes datagram =
          packet({.batch = number / ROWS, .row = number % ROWS}, record(static_cast<std::int16_t>(number), 1));
      const Receiver::Datagram one(datagram);
      while (receiver.counters().records == number) receiver.take({&one, 1});  // without credit it must be sent again
    }
  });
  const auto end = std::chrono::steady_clock::now() + DEADLINE;
  for (std::uint32_t batch = 0; batch < BATCHES; batch++) {
    const std::vector<Column> columns = receiver.content(batch).columns;
    std::uint32_t rows = 0;
    while (rows < ROWS) {
      if (std::chrono::steady_clock::now() > end) FAIL("no more rows come");
      const std::uint32_t taken = receiver.rows_taken(batch);
      for (; rows < taken; rows++) {  // without a lock
        CHECK(columns[0].dense[rows] == 1.5F);
        CHECK(columns[4].values[rows] == static_cast<std::int16_t>(batch * ROWS + rows));
      }
    }
    receiver.release(batch);
  }
  filler.join();
  CHECK(receiver.counters().records == BATCHES * ROWS);
}

TEST_CASE("a ring that no address space has room for is refused") {
  RecordSchema schema;
  schema.ids.assign(512, {.width_bytes = 8, .length = 1024, .is_list = true});
  CHECK_THROWS_WITH_AS(Receiver(schema, {}, SESSION, 1 << 20, 256), doctest::Contains("bytes of address space"),
                       std::system_error);
}
