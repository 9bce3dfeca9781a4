// SPDX-License-Identifier: Apache-2.0
#include "record_encoder.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>

namespace sennit::offload {
namespace {

// Columns are written one after another into this many records at a time. So the records stay in the first- and
// second-level cache, and the loop over a column has no decisions.
constexpr std::size_t BLOCK_ROWS = 128;

// The position of the next field in each record of a block.
using Places = std::array<std::byte*, BLOCK_ROWS>;

template <bool SWAP, typename Number>
void put(std::byte*& at, Number number) {
  if constexpr (SWAP && sizeof(Number) == 2) number = static_cast<Number>(__builtin_bswap16(number));
  if constexpr (SWAP && sizeof(Number) == 4) number = static_cast<Number>(__builtin_bswap32(number));
  if constexpr (SWAP && sizeof(Number) == 8) number = static_cast<Number>(__builtin_bswap64(number));
  std::memcpy(at, &number, sizeof number);
  at += sizeof number;
}

template <bool SWAP>
class Writer {
 public:
  Writer(const RecordColumns& columns, Places& places, std::size_t first, std::size_t count)
      : columns_(columns), places_(places), first_(first), count_(count) {}

  void write() {
    labels();
    for (std::size_t number = 0; number < columns_.is_bfloat16.size(); number++) dense(number);
    for (const IdsColumn& ids : columns_.ids) {
      if (ids.offsets == nullptr)
        by_width(ids);
      else
        lengths(ids);
    }
    for (const IdsColumn& ids : columns_.ids)
      if (ids.offsets != nullptr) by_width(ids);
  }

 private:
  void labels() {
    const float* from = columns_.labels + first_;
    for (std::size_t i = 0; i < count_; i++) {
      if (columns_.is_binary)
        put<SWAP>(places_[i], static_cast<std::uint8_t>(from[i] != 0));
      else
        put<SWAP>(places_[i], std::bit_cast<std::uint32_t>(from[i]));
    }
  }

  void dense(std::size_t number) {
    const std::size_t width = columns_.is_bfloat16.size();
    const float* from = columns_.dense + first_ * width + number;
    const bool is_short = columns_.is_bfloat16[number];
    for (std::size_t i = 0; i < count_; i++) {
      const auto bits = std::bit_cast<std::uint32_t>(from[i * width]);
      if (is_short)
        put<SWAP>(places_[i], static_cast<std::uint16_t>(bits >> 16));
      else
        put<SWAP>(places_[i], bits);
    }
  }

  void lengths(const IdsColumn& ids) {
    const std::int64_t* from = ids.offsets + first_;
    for (std::size_t i = 0; i < count_; i++) {
      const auto length = static_cast<std::uint64_t>(from[i + 1] - from[i]);
      if (ids.length_bytes == 1)
        put<SWAP>(places_[i], static_cast<std::uint8_t>(length));
      else
        put<SWAP>(places_[i], static_cast<std::uint16_t>(length));
    }
  }

  void by_width(const IdsColumn& ids) {
    switch (ids.width_bytes) {
      case 1:
        return by_source<std::uint8_t>(ids);
      case 2:
        return by_source<std::uint16_t>(ids);
      case 4:
        return by_source<std::uint32_t>(ids);
      default:
        return by_source<std::uint64_t>(ids);
    }
  }

  template <typename Wire>
  void by_source(const IdsColumn& ids) {
    if (ids.is_wide)
      values<Wire, std::int64_t>(ids);
    else
      values<Wire, std::int32_t>(ids);
  }

  template <typename Wire, typename Source>
  void values(const IdsColumn& ids) {
    const auto* from = static_cast<const Source*>(ids.values);
    for (std::size_t i = 0; i < count_; i++) {
      const std::size_t row = first_ + i;
      const auto begin = ids.offsets != nullptr ? static_cast<std::size_t>(ids.offsets[row]) : row * ids.length;
      const auto end = ids.offsets != nullptr ? static_cast<std::size_t>(ids.offsets[row + 1]) : begin + ids.length;
      for (std::size_t at = begin; at < end; at++)
        put<SWAP>(places_[i], static_cast<Wire>(static_cast<std::int64_t>(from[at])));
    }
  }

  const RecordColumns& columns_;
  Places& places_;
  std::size_t first_, count_;
};

}  // namespace

std::size_t RecordColumns::fixed_bytes() const {
  std::size_t size = is_binary ? 1 : 4;
  for (const bool is_short : is_bfloat16) size += is_short ? 2 : 4;
  for (const IdsColumn& column : ids)
    size += column.offsets != nullptr ? column.length_bytes : column.width_bytes * column.length;
  return size;
}

bool RecordColumns::has_lists() const {
  return std::any_of(ids.begin(), ids.end(), [](const IdsColumn& column) { return column.offsets != nullptr; });
}

std::uint64_t encoded_bytes(const RecordColumns& columns) {
  std::uint64_t size = std::uint64_t{columns.rows} * columns.fixed_bytes();
  for (const IdsColumn& ids : columns.ids)
    if (ids.offsets != nullptr)
      size += ids.width_bytes * static_cast<std::uint64_t>(ids.offsets[columns.rows] - ids.offsets[0]);
  return size;
}

void encode_records(const RecordColumns& columns, std::span<std::byte> out, std::span<std::uint64_t> starts) {
  if (out.size() != encoded_bytes(columns)) throw std::invalid_argument("memory of another size than the records");
  if (starts.size() != (columns.has_lists() || !starts.empty() ? columns.rows + 1 : 0))
    throw std::invalid_argument("starts for another number of records");
  const std::size_t fixed_bytes = columns.fixed_bytes();
  const bool swap = columns.is_big_endian != (std::endian::native == std::endian::big);
  Places places;
  std::byte* next = out.data();
  for (std::size_t first = 0; first < columns.rows; first += BLOCK_ROWS) {
    const std::size_t count = std::min(BLOCK_ROWS, columns.rows - first);
    for (std::size_t i = 0; i < count; i++) {
      if (!starts.empty()) starts[first + i] = static_cast<std::uint64_t>(next - out.data());
      places[i] = next;
      next += fixed_bytes;
      for (const IdsColumn& ids : columns.ids)
        if (ids.offsets != nullptr)
          next += ids.width_bytes * static_cast<std::size_t>(ids.offsets[first + i + 1] - ids.offsets[first + i]);
    }
    if (swap)
      Writer<true>(columns, places, first, count).write();
    else
      Writer<false>(columns, places, first, count).write();
  }
  if (!starts.empty()) starts[columns.rows] = static_cast<std::uint64_t>(next - out.data());
}

}  // namespace sennit::offload
