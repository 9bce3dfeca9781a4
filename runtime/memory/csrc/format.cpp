// SPDX-License-Identifier: Apache-2.0
#include "format.hpp"

#if SENNIT_ISAL
#include <isa-l/crc.h>
#else
#include "sennit/crc32.hpp"
#endif

#include <algorithm>
#include <bit>
#include <set>
#include <stdexcept>

#include "spill_log.hpp"
#include "store_error.hpp"

namespace sennit::memory {

static_assert(std::endian::native == std::endian::little, "the file's numbers are little-endian");

namespace {

constexpr std::uint64_t MEBIBYTE = 1 << 20;
constexpr std::size_t MAX_NAME_BYTES = 1024;
constexpr std::size_t MAX_RECORD_BYTES = 1 << 20;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }

template <typename Number>
void put(std::string& out, Number value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put(std::string& out, const std::string& text) {
  put(out, static_cast<std::uint32_t>(text.size()));
  out += text;
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <typename Number>
  Number number() {
    Number value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }

  std::string text() {
    const auto size = number<std::uint32_t>();
    return {reinterpret_cast<const char*>(take(size)), size};
  }

 private:
  const std::byte* take(std::size_t size) {
    if (size > bytes_.size()) throw std::out_of_range("a directory that ends too early");
    const std::byte* data = bytes_.data();
    bytes_ = bytes_.subspan(size);
    return data;
  }

  std::span<const std::byte> bytes_;
};

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size_bytes) {
#if SENNIT_ISAL
  // ISA-L does not change the buffer, although its prototype allows it.
  return crc32_iscsi(static_cast<unsigned char*>(const_cast<void*>(data)), static_cast<int>(size_bytes), crc);
#else
  return wire::crc_register<wire::CRC32C_POLYNOMIAL>(crc, data, size_bytes);
#endif
}

std::uint64_t Geometry::row_count() const {
  std::uint64_t sum = 0;
  for (const Table& table : tables) sum += table.row_count;
  return sum;
}

std::size_t Geometry::payload_bytes() const {
  std::size_t sum = 0;
  for (const Part& part : parts) sum += part.row_bytes;
  return sum;
}

std::string Geometry::name_of(std::uint64_t row) const {
  std::uint64_t first = 0;
  for (const Table& table : tables) {
    if (row - first < table.row_count) return "table '" + table.name + "' row " + std::to_string(row - first);
    first += table.row_count;
  }
  return "row " + std::to_string(row) + " of " + std::to_string(first);
}

void Geometry::check() const {
  const auto refuse = [](const std::string& what) { throw StoreError(Fault::ARGUMENT, what); };
  if (tables.empty() || parts.empty()) refuse("a store without tables, or rows without parts");
  std::set<std::string> names;
  for (const Table& table : tables) {
    if (table.name.size() > MAX_NAME_BYTES) refuse("a table's name of " + std::to_string(table.name.size()) + " bytes");
    if (!names.insert(table.name).second) refuse("two tables are called '" + table.name + "'");
    if (table.row_count >= SpillLog::MAX_RECORDS)
      refuse("table '" + table.name + "' of " + std::to_string(table.row_count) + " rows; allowed: below " +
             std::to_string(SpillLog::MAX_RECORDS));
  }
  if (payload_bytes() == 0 || record_bytes() > MAX_RECORD_BYTES)
    refuse("rows of " + std::to_string(payload_bytes()) + " bytes; allowed: 1 to " +
           std::to_string(MAX_RECORD_BYTES - 4));
}

std::string Geometry::encode() const {
  std::string out;
  put(out, static_cast<std::uint32_t>(parts.size()));
  for (const Part& part : parts) {
    put(out, part.name);
    put(out, part.dtype);
    put(out, part.columns);
    put(out, part.row_bytes);
  }
  put(out, static_cast<std::uint32_t>(tables.size()));
  for (const Table& table : tables) {
    put(out, table.name);
    put(out, table.row_count);
  }
  return out;
}

Geometry Geometry::decode(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Geometry geometry;
  for (auto count = reader.number<std::uint32_t>(); count > 0; count--) {
    Part part;
    part.name = reader.text();
    part.dtype = reader.text();
    part.columns = reader.number<std::uint32_t>();
    part.row_bytes = reader.number<std::uint32_t>();
    geometry.parts.push_back(std::move(part));
  }
  for (auto count = reader.number<std::uint32_t>(); count > 0; count--) {
    Table table;
    table.name = reader.text();
    table.row_count = reader.number<std::uint64_t>();
    geometry.tables.push_back(std::move(table));
  }
  return geometry;
}

std::uint32_t record_crc(std::uint64_t row, const std::byte* payload, std::size_t payload_bytes) {
  return crc32c(crc32c(~0u, &row, sizeof row), payload, payload_bytes);
}

void seal_record(std::uint64_t row, std::byte* record, std::size_t payload_bytes, std::size_t record_bytes) {
  std::memset(record + payload_bytes, 0, record_bytes - payload_bytes);
  const std::uint32_t crc = record_crc(row, record, payload_bytes);
  std::memcpy(record + record_bytes - sizeof crc, &crc, sizeof crc);
}

bool is_whole(std::uint64_t row, const std::byte* record, std::size_t payload_bytes, std::size_t record_bytes) {
  std::uint32_t crc = 0;
  std::memcpy(&crc, record + record_bytes - sizeof crc, sizeof crc);
  return crc == record_crc(row, record, payload_bytes);
}

Superblock lay_out(const Geometry& geometry) {
  geometry.check();
  const std::string directory = geometry.encode();
  Superblock block{};
  std::memcpy(block.magic, MAGIC, sizeof MAGIC);
  block.version = VERSION;
  block.state = Superblock::CLEAN;
  block.row_count = geometry.row_count();
  block.directory_bytes = directory.size();
  block.directory_crc = crc32c(~0u, directory.data(), directory.size());
  block.base_offset = round_up(DIRECTORY_OFFSET + directory.size(), BLOCK_BYTES);
  block.log_offset = round_up(block.base_offset + block.row_count * geometry.record_bytes() + BLOCK_BYTES, MEBIBYTE);
  block.segment_bytes = SpillLog::segment_bytes(geometry.record_bytes());
  block.segment_count = SpillLog::segment_count(block.row_count, geometry.record_bytes());
  return block;
}

}  // namespace sennit::memory
