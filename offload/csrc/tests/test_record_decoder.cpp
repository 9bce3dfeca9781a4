// SPDX-License-Identifier: Apache-2.0
// Decodes records and malformed bodies. Each body is at the end of its own allocation, so that the address sanitizer
// sees reads behind it.
#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <stdexcept>

#include "packets.hpp"
#include "record_decoder.hpp"

using namespace sennit::offload;

namespace {

constexpr std::size_t ROWS = 8;

struct Decoded {
  explicit Decoded(const RecordSchema& schema, const RowFilters& filters = {})
      : decoder(schema, filters, ROWS), memory(decoder.columns_bytes()), filled(decoder.nothing()) {}

  bool append(const Bytes& body, std::size_t records, std::uint64_t number = 0) {
    return decoder.append(body, records, number, memory.data(), filled);
  }
  std::vector<Column> columns() const { return decoder.columns(memory.data(), filled); }

  RecordDecoder decoder;
  Bytes memory;
  Filled filled;
};

std::vector<std::int64_t> values(const Column& column) { return {column.values, column.values + column.count}; }
std::vector<std::int32_t> lengths(const Column& column) { return {column.lengths, column.lengths + column.rows}; }

}  // namespace

TEST_CASE("fields of every kind become columns") {
  Decoded found(big_endian_schema());
  REQUIRE(found.append(joined({record(-7, 2), record(300, 0)}), 2));
  REQUIRE(found.append(record(1, 300), 1));
  const auto columns = found.columns();
  REQUIRE(columns.size() == 5);
  CHECK(found.filled.rows == 3);
  for (std::size_t row = 0; row < 3; row++) {
    CHECK(found.decoder.labels(found.memory.data())[row] == 1.0F);
    CHECK(columns[0].dense[row] == 1.5F);
    CHECK(columns[1].dense[row] == -2.0F);
  }
  CHECK(values(columns[2]) == std::vector<std::int64_t>{-7, -1, 300, -1, 1, -1});
  CHECK(lengths(columns[2]) == std::vector<std::int32_t>{2, 2, 2});
  CHECK(values(columns[3]) == std::vector<std::int64_t>(302, 255));
  CHECK(lengths(columns[3]) == std::vector<std::int32_t>{2, 0, 300});
  CHECK(values(columns[4]) == std::vector<std::int64_t>{-7, 300, 1});
}

TEST_CASE("what a plan does not want is checked and not kept") {
  RecordSchema schema = big_endian_schema();
  schema.dense[0].is_wanted = schema.ids[0].is_wanted = schema.ids[1].is_wanted = false;
  Decoded found(schema);
  REQUIRE(found.append(record(4, 2), 1));
  CHECK_FALSE(found.append(record(4, 301), 1));
  CHECK(found.columns().size() == 2);
}

TEST_CASE("successive fields of a kind are one run, but for those between that nobody wants") {
  RecordSchema schema;
  for (int n = 0; n < 6; n++) schema.ids.push_back({.width_bytes = 1, .is_wanted = n != 2});
  Decoded found(schema);
  REQUIRE(found.append({0, 10, 11, 12, 13, 14, 15}, 1));
  std::vector<std::int64_t> row;
  for (const Column& column : found.columns()) row.push_back(column.values[0]);
  CHECK(row == std::vector<std::int64_t>{10, 11, 13, 14, 15});
}

TEST_CASE("filters keep what they say, and a NaN is in no range") {
  RowFilters filters;
  filters.ranges.push_back({.dense = 0, .low = 1.5F, .high = 1.5F});
  filters.lengths.push_back({.ids = 1, .least = 1, .most = 2});
  Decoded found(big_endian_schema(), filters);
  Bytes nan = record(5, 1);
  nan[1] = 0x7f;
  REQUIRE(found.append(joined({record(1, 0), record(2, 1), record(3, 2), record(4, 3), nan}), 5));
  CHECK(values(found.columns()[4]) == std::vector<std::int64_t>{2, 3});

  filters = {};
  filters.samples.push_back({.seed = 1, .below = std::uint64_t{1} << 31});
  Decoded sampled(big_endian_schema(), filters);
  for (std::uint64_t number = 0; number < 200 && sampled.filled.rows < ROWS; number++)
    REQUIRE(sampled.append(record(1, 0), 1, number));
  CHECK(sampled.filled.rows == ROWS);
}

TEST_CASE("a body that ends too early or too late, at every byte") {
  const Bytes good = joined({record(1, 3), record(2, 0)});
  for (std::size_t size = 0; size <= good.size(); size++) {
    Decoded found(big_endian_schema());
    CHECK(found.append(Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)), 2) ==
          (size == good.size()));
  }
  Bytes longer = good;
  longer.push_back(0);
  Decoded found(big_endian_schema());
  CHECK_FALSE(found.append(longer, 2));
}

TEST_CASE("random bytes are records or are not, and stay within their memory") {
  std::mt19937 random(11);
  for (int round = 0; round < 20'000; round++) {
    Decoded found(big_endian_schema());
    Bytes body(random() % 120);
    for (auto& byte : body) byte = random() % 4 == 0 ? 0 : static_cast<std::uint8_t>(random());
    const std::size_t records = 1 + random() % ROWS;
    if (found.append(body, records)) CHECK(found.filled.rows == records);
  }
}

TEST_CASE("a schema that is none is refused by name") {
  const auto refused = [](const RecordSchema& schema, const RowFilters& filters, const char* message) {
    CHECK_THROWS_WITH_AS(RecordDecoder(schema, filters, ROWS), doctest::Contains(message), std::invalid_argument);
  };
  RecordSchema schema;
  schema.ids = {{.width_bytes = 3}};
  refused(schema, {}, "ids of 3 bytes");
  schema.ids = {{.length = 1025, .is_list = true}};
  refused(schema, {}, "length 1025");
  schema.ids = {{.length = 0}};
  refused(schema, {}, "length 0");
  schema.ids.assign(513, {});
  refused(schema, {}, "513 fields");
  schema.ids = {{}};
  RowFilters filters;
  filters.ranges.push_back({.dense = 0, .low = 0, .high = 1});
  refused(schema, filters, "no dense field 0");
  filters = {};
  filters.lengths.push_back({.ids = 0, .least = 0, .most = 1});
  refused(schema, filters, "no list 0");
}
