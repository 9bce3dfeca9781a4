// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: whatever the schema and the datagrams, the columns receive whole rows or nothing.
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "batch.hpp"
#include "checksum.hpp"
#include "receiver.hpp"

using namespace sennit::offload;

namespace {

constexpr std::uint32_t ROWS = 32, SLOTS = 2;

// Reads the input from its start; zeros behind its end.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : rest_(data, size) {}

  std::uint8_t byte() {
    if (rest_.empty()) return 0;
    const std::uint8_t found = rest_.front();
    rest_ = rest_.subspan(1);
    return found;
  }
  // A separate copy, so that the address sanitizer sees reads beyond its end.
  std::vector<std::uint8_t> bytes(std::size_t size) {
    size = std::min(size, rest_.size());
    std::vector<std::uint8_t> found(rest_.begin(), rest_.begin() + static_cast<std::ptrdiff_t>(size));
    rest_ = rest_.subspan(size);
    return found;
  }
  bool is_empty() const { return rest_.empty(); }

 private:
  std::span<const std::uint8_t> rest_;
};

RecordSchema schema_of(Input& input) {
  const std::uint8_t first = input.byte();
  RecordSchema schema{.is_big_endian = (first & 1) != 0, .is_label_float = (first & 2) != 0, .dense = {}, .ids = {}};
  for (int n = first >> 2 & 3; n > 0; n--) {
    const std::uint8_t kind = input.byte();
    schema.dense.push_back({.is_bfloat16 = (kind & 1) != 0, .is_wanted = (kind & 2) != 0});
  }
  for (int n = first >> 4 & 7; n > 0; n--) {
    const std::uint8_t kind = input.byte();
    schema.ids.push_back({.width_bytes = 1 << (kind & 3),
                          .is_signed = (kind & 4) != 0,
                          .length = std::uint32_t{1} + input.byte() * (kind & 8 ? 4U : 1U) % 1024,
                          .is_list = (kind & 16) != 0,
                          .is_wanted = (kind & 32) != 0});
  }
  return schema;
}

// Makes nine of ten headers valid enough that the records behind them are parsed.
void mend(std::vector<std::uint8_t>& datagram, const Receiver& receiver, std::uint8_t choice) {
  if (datagram.size() < HEADER_BYTES || choice % 10 == 0) return;
  const std::uint8_t batch = datagram[15] % 3;
  const std::size_t body_bytes = datagram.size() - HEADER_BYTES;
  const std::uint8_t head[] = {0x5e,
                               0x17,
                               2,
                               0,
                               0,
                               0,
                               0,
                               7,
                               0,
                               0,
                               0,
                               9,
                               0,
                               0,
                               0,
                               batch,
                               0,
                               0,
                               0,
                               static_cast<std::uint8_t>(receiver.rows_taken(batch)),
                               0,
                               datagram[21],
                               static_cast<std::uint8_t>(body_bytes >> 8),
                               static_cast<std::uint8_t>(body_bytes)};
  std::memcpy(datagram.data(), head, sizeof head);
  const std::uint64_t checksum = __builtin_bswap64(checksum_of(datagram));
  std::memcpy(datagram.data() + CHECKSUM_AT, &checksum, sizeof checksum);
}

void check_columns(const Receiver& receiver, std::uint32_t batch) {
  const Receiver::Content content = receiver.content(batch);
  if (content.rows > ROWS) std::abort();
  for (const Column& column : content.columns) {
    if (column.rows != content.rows) std::abort();
    std::size_t count = 0;
    for (std::size_t row = 0; row < column.rows && !column.is_dense; row++)
      count += static_cast<std::size_t>(column.lengths[row]);
    if (!column.is_dense && count != column.count) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const RecordSchema schema = schema_of(input);
  RowFilters filters;
  const std::uint8_t filtered = input.byte();
  if ((filtered & 1) != 0) filters.samples.push_back({.seed = filtered, .below = std::uint64_t{1} << 31});
  if ((filtered & 2) != 0 && !schema.dense.empty()) filters.ranges.push_back({.dense = 0, .low = -1, .high = 1});
  if ((filtered & 4) != 0 && !schema.ids.empty() && schema.ids[0].is_list)
    filters.lengths.push_back({.ids = 0, .least = 1, .most = 3});
  Receiver receiver(schema, filters, Session{.schema_id = 7, .id = 9}, ROWS, SLOTS);
  std::uint64_t datagrams = 0;
  while (!input.is_empty()) {
    const std::uint8_t choice = input.byte();
    std::vector<std::uint8_t> datagram = input.bytes(std::size_t{input.byte()} * (choice & 64 ? 4 : 1));
    mend(datagram, receiver, choice);
    const Receiver::Datagram one(datagram);
    receiver.take({&one, 1});
    datagrams++;
    check_columns(receiver, choice & 1);
    if (choice >= 250) receiver.release(choice & 1);
  }
  std::uint64_t counted = 0;
  for (const std::uint64_t number : receiver.counters().datagrams) counted += number;
  if (counted != datagrams) std::abort();
  return 0;
}
