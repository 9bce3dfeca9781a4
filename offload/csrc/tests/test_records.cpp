// SPDX-License-Identifier: Apache-2.0
// Runs the encoder and the sender of records under sanitizers, in memory of exactly the right size.
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <random>

#include "record_encoder.hpp"
#include "record_sender.hpp"

using namespace sennit::offload;

namespace {

// Rows with a label, two numbers (one of them short), two fixed ids and two lists, in memory of exactly their size.
struct Sample {
  explicit Sample(std::size_t rows, bool has_lists, bool is_big_endian, std::uint32_t seed) {
    std::mt19937 random(seed);
    const auto draw = [&](std::size_t count) {
      std::vector<std::int64_t> made(count);
      for (auto& value : made) value = static_cast<std::int64_t>(random() % 200);
      return made;
    };
    columns.rows = rows;
    columns.is_big_endian = is_big_endian;
    labels.assign(rows, 1.0f);
    dense.assign(rows * 2, 1.5f);
    columns.labels = labels.data();
    columns.dense = dense.data();
    columns.is_bfloat16 = {false, true};
    for (std::size_t field = 0; field < (has_lists ? 4 : 2); field++) {
      IdsColumn column;
      column.is_wide = true;
      column.width_bytes = std::size_t{1} << field;
      if (field < 2) {
        column.length = field + 1;
        ids.push_back(draw(rows * column.length));
      } else {
        std::vector<std::int64_t> bounds{0};
        for (std::size_t row = 0; row < rows; row++) bounds.push_back(bounds.back() + random() % 6);
        ids.push_back(draw(static_cast<std::size_t>(bounds.back())));
        offsets.push_back(std::move(bounds));
        column.offsets = offsets.back().data();
        column.length_bytes = field - 1;
      }
      column.values = ids.back().data();
      columns.ids.push_back(column);
    }
    size_bytes = encoded_bytes(columns);
    bytes = std::make_unique<std::byte[]>(size_bytes);
    if (has_lists) starts.resize(rows + 1);
    encode_records(columns, {bytes.get(), size_bytes}, starts);
  }

  RecordStore store() const {
    return {{bytes.get(), size_bytes}, starts, columns.has_lists() ? 0 : columns.fixed_bytes(), columns.rows};
  }

  RecordColumns columns;
  std::vector<float> labels, dense;
  std::vector<std::vector<std::int64_t>> ids, offsets;
  std::size_t size_bytes = 0;
  std::unique_ptr<std::byte[]> bytes;
  std::vector<std::uint64_t> starts;
};

// Both ends of a connection on the loopback interface.
struct Pair {
  Pair() {
    receiver = socket(AF_INET6, SOCK_DGRAM, 0);
    sender = socket(AF_INET6, SOCK_DGRAM, 0);
    sockaddr_in6 address{};
    address.sin6_family = AF_INET6;
    address.sin6_addr = IN6ADDR_LOOPBACK_INIT;
    socklen_t size = sizeof address;
    REQUIRE(bind(receiver, reinterpret_cast<sockaddr*>(&address), size) == 0);
    REQUIRE(getsockname(receiver, reinterpret_cast<sockaddr*>(&address), &size) == 0);
    REQUIRE(connect(sender, reinterpret_cast<sockaddr*>(&address), size) == 0);
    const int buffer_bytes = 4 << 20;
    setsockopt(receiver, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes);
  }
  ~Pair() {
    close(receiver);
    close(sender);
  }

  std::vector<std::byte> receive() const {
    pollfd readable{receiver, POLLIN, 0};
    REQUIRE(poll(&readable, 1, 10'000) == 1);
    std::vector<std::byte> packet(1 << 16);
    packet.resize(static_cast<std::size_t>(recv(receiver, packet.data(), packet.size(), 0)));
    return packet;
  }

  int receiver = -1, sender = -1;
};

std::vector<std::int64_t> some_records(std::size_t count, std::size_t below, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::int64_t> found(count);
  for (auto& number : found) number = static_cast<std::int64_t>(random() % below);
  return found;
}

}  // namespace

TEST_CASE("records fill the memory that they ask for") {
  for (const std::size_t rows : {1, 127, 128, 129, 500}) {
    for (const bool has_lists : {false, true}) {
      const Sample little(rows, has_lists, false, 1), big(rows, has_lists, true, 1);
      CHECK(little.size_bytes == big.size_bytes);
      if (has_lists) CHECK(little.starts == big.starts);
      if (!has_lists) CHECK(little.size_bytes == rows * (1 + 4 + 2 + 1 + 2 * 2));
      // The label is one byte, and then 1.5 = 0x3fc00000.
      CHECK(little.store().record(rows - 1)[4] == std::byte{0x3f});
      CHECK(big.store().record(rows - 1)[1] == std::byte{0x3f});
    }
  }
}

TEST_CASE("memory of another size is refused") {
  const Sample sample(10, true, false, 1);
  std::vector<std::byte> out(sample.size_bytes);
  std::vector<std::uint64_t> starts(11);
  const auto encode = [&](std::size_t bytes, std::size_t count) {
    encode_records(sample.columns, std::span(out).first(bytes), std::span(starts).first(count));
  };
  CHECK_NOTHROW(encode(sample.size_bytes, 11));
  CHECK_THROWS_AS(encode(sample.size_bytes - 1, 11), std::invalid_argument);
  CHECK_THROWS_AS(encode(sample.size_bytes, 10), std::invalid_argument);
  CHECK_THROWS_AS(encode(sample.size_bytes, 0), std::invalid_argument);
}

TEST_CASE("packets hold whole records, in order, and none is left out") {
  for (const bool has_lists : {false, true}) {
    const Sample sample(100, has_lists, false, 2);
    const RecordStore store = sample.store();
    for (const std::size_t body_max_bytes : {80, 400, 60'000}) {
      const RecordSender sender(store, 1, 2, body_max_bytes);
      const auto records = some_records(300, 100, 3);
      const auto memory = std::make_unique<std::byte[]>(sender.packet_max_bytes());
      for (std::uint32_t row = 0; row < records.size();) {
        const auto packet = sender.pack(records, 7, row, memory.get());
        REQUIRE(packet.next_row > row);
        std::size_t at = HEADER_BYTES;
        for (; row < packet.next_row; row++) {
          const auto record = store.record(static_cast<std::size_t>(records[row]));
          REQUIRE(std::memcmp(memory.get() + at, record.data(), record.size()) == 0);
          at += record.size();
        }
        CHECK(at == packet.size_bytes);
      }
    }
  }
}

TEST_CASE("what is sent is what is packed, in messages of any kind") {
  const Pair pair;
  for (const bool has_lists : {false, true}) {
    const Sample sample(100, has_lists, false, 4);
    for (const std::uint32_t packets_max : {1u, 5u, 200u, 201u}) {
      RecordSender sender(sample.store(), 1, 2, 150);
      if (packets_max == 201) sender.send_apart();
      CHECK(sender.is_segmenting() == (packets_max != 201));
      const auto records = some_records(400, 100, 5);
      const auto memory = std::make_unique<std::byte[]>(sender.packet_max_bytes());
      std::uint32_t expected_row = 0;
      for (std::uint32_t row = 0; row < records.size();) {
        const auto progress = sender.send(pair.sender, records, 7, row, packets_max);
        REQUIRE(progress.error == 0);
        REQUIRE(progress.packets <= packets_max);
        for (std::uint32_t number = 0; number < progress.packets; number++) {
          const auto expected = sender.pack(records, 7, expected_row, memory.get());
          const auto found = pair.receive();
          REQUIRE(found.size() == expected.size_bytes);
          REQUIRE(std::memcmp(found.data(), memory.get(), found.size()) == 0);
          expected_row = expected.next_row;
        }
        row = progress.next_row;
        REQUIRE(row == expected_row);
      }
    }
  }
}

TEST_CASE("a socket that takes nothing says so, and nothing is lost count of") {
  const Sample sample(10, false, false, 6);
  RecordSender sender(sample.store(), 1, 2, 150);
  const auto records = some_records(50, 10, 7);
  const auto progress = sender.send(-1, records, 0, 4, 100);
  CHECK(progress.error == EBADF);
  CHECK(progress.next_row == 4);
  CHECK(progress.packets == 0);
}

TEST_CASE("stores whose numbers contradict each other are refused") {
  const Sample fixed(10, false, false, 8), jagged(10, true, false, 8);
  RecordStore store = fixed.store();
  CHECK_THROWS_AS(RecordSender(store, 1, 2, store.record_bytes - 1), std::invalid_argument);
  CHECK_THROWS_AS(RecordSender(store, 1, 2, BODY_MAX_BYTES + 1), std::invalid_argument);
  CHECK_THROWS_AS(RecordSender(store, 1, 2, 0), std::invalid_argument);
  store.count = 11;
  CHECK_THROWS_AS(RecordSender(store, 1, 2, 1000), std::invalid_argument);
  store.record_bytes = 0;
  CHECK_THROWS_AS(RecordSender(store, 1, 2, 1000), std::invalid_argument);
  std::vector<std::uint64_t> starts = jagged.starts;
  const auto with_starts = [&] { return RecordStore{jagged.store().bytes, starts, 0, 10}; };
  CHECK_NOTHROW(RecordSender(with_starts(), 1, 2, 1000));
  std::swap(starts[3], starts[4]);
  CHECK_THROWS_AS(RecordSender(with_starts(), 1, 2, 1000), std::invalid_argument);
  starts = jagged.starts;
  starts.back() += 1;
  CHECK_THROWS_AS(RecordSender(with_starts(), 1, 2, 1000), std::invalid_argument);
}
