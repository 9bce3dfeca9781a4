// SPDX-License-Identifier: Apache-2.0
#include "record_decoder.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../../ebpf/include/operators.h"

namespace sennit::offload {
namespace {

constexpr std::size_t FIELDS_MAX = 512;  // offload/schema.py
constexpr std::size_t LIST_MAX_LENGTH = 1024;
constexpr std::size_t LINE_BYTES = 64;
constexpr std::uint32_t ONE_BITS = 0x3f800000;  // 1.0F

template <typename Unsigned>
Unsigned swap_bytes(Unsigned number) {
  if constexpr (sizeof number == 2) return __builtin_bswap16(number);
  if constexpr (sizeof number == 4) return __builtin_bswap32(number);
  if constexpr (sizeof number == 8) return __builtin_bswap64(number);
  return number;
}

template <typename Number, bool swapped>
Number load(const std::uint8_t* from) {
  std::make_unsigned_t<Number> raw;
  std::memcpy(&raw, from, sizeof raw);
  return static_cast<Number>(swapped ? swap_bytes(raw) : raw);
}

template <typename Number, bool swapped>
std::uint64_t load_any(const std::uint8_t* from) {
  return static_cast<std::uint64_t>(load<Number, swapped>(from));
}

std::uint64_t load_binary_label(const std::uint8_t* from) { return *from != 0 ? ONE_BITS : 0; }

// The element type of a column: an id of any width, or the bits of a float.
template <typename Number, bool swapped>
std::int64_t load_id(const std::uint8_t* from) {
  return static_cast<std::int64_t>(load<Number, swapped>(from));
}
template <bool swapped>
std::uint32_t load_float32(const std::uint8_t* from) {
  return load<std::uint32_t, swapped>(from);
}
template <bool swapped>
std::uint32_t load_bfloat16(const std::uint8_t* from) {
  return std::uint32_t{load<std::uint16_t, swapped>(from)} << 16;
}

template <auto load_element, std::size_t width_bytes>
void scatter(const std::uint8_t* from, std::uint8_t* memory, const std::size_t* columns, std::size_t count,
             std::size_t row) {
  for (std::size_t n = 0; n < count; n++) {
    const auto element = load_element(from + n * width_bytes);
    std::memcpy(memory + columns[n] + row * sizeof element, &element, sizeof element);
  }
}

template <auto load_element, std::size_t width_bytes>
void widen(const std::uint8_t* __restrict from, std::uint8_t* __restrict to, std::size_t count) {
  for (std::size_t n = 0; n < count; n++) {
    const auto element = load_element(from + n * width_bytes);
    std::memcpy(to + n * sizeof element, &element, sizeof element);
  }
}

bool is_swapped(const RecordSchema& schema) {
  return schema.is_big_endian != (std::endian::native == std::endian::big);
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("schema: " + what); }

}  // namespace

template <typename Number, bool swapped>
RecordDecoder::Wire RecordDecoder::ids_wire() {
  constexpr auto element = &load_id<Number, swapped>;
  return {&load_any<Number, swapped>, &scatter<element, sizeof(Number)>, &widen<element, sizeof(Number)>};
}

template <bool swapped>
RecordDecoder::Wire RecordDecoder::ids_wire(int width_bytes, bool is_signed) {
  switch (width_bytes) {
    case 1:
      return is_signed ? ids_wire<std::int8_t, swapped>() : ids_wire<std::uint8_t, swapped>();
    case 2:
      return is_signed ? ids_wire<std::int16_t, swapped>() : ids_wire<std::uint16_t, swapped>();
    case 4:
      return is_signed ? ids_wire<std::int32_t, swapped>() : ids_wire<std::uint32_t, swapped>();
    case 8:
      return ids_wire<std::int64_t, swapped>();
    default:
      refuse("ids of " + std::to_string(width_bytes) + " bytes; allowed: 1, 2, 4, 8");
  }
}

template <bool swapped>
RecordDecoder::Wire RecordDecoder::dense_wire(bool is_bfloat16) {
  constexpr auto whole = &load_float32<swapped>, half = &load_bfloat16<swapped>;
  if (is_bfloat16)
    return {[](const std::uint8_t* from) -> std::uint64_t { return load_bfloat16<swapped>(from); }, &scatter<half, 2>,
            nullptr};
  return {[](const std::uint8_t* from) -> std::uint64_t { return load_float32<swapped>(from); }, &scatter<whole, 4>,
          nullptr};
}

RecordDecoder::RecordDecoder(const RecordSchema& schema, const RowFilters& filters, std::size_t batch_rows)
    : batch_rows_(batch_rows) {
  if (schema.dense.size() + schema.ids.size() > FIELDS_MAX)
    refuse(std::to_string(schema.dense.size() + schema.ids.size()) + " fields; allowed: " + std::to_string(FIELDS_MAX));
  labels_column_ = reserve(sizeof(float));
  load_label_ = !schema.is_label_float ? load_binary_label
                : is_swapped(schema)   ? &load_any<std::uint32_t, true>
                                       : &load_any<std::uint32_t, false>;
  fixed_bytes_ = schema.is_label_float ? 4 : 1;
  add_dense(schema);
  add_ids(schema);
  add_filters(schema, filters);
}

// A cache line separates columns: at distances of powers of two they would all fall into one set of the first-level
// cache.
std::size_t RecordDecoder::reserve(std::size_t row_bytes) {
  const std::size_t begin = columns_bytes_;
  columns_bytes_ = (begin + row_bytes * batch_rows_ + 2 * LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
  return begin;
}

void RecordDecoder::add_to_run(Scatter scatter, std::size_t offset, std::size_t width_bytes, std::size_t column) {
  if (runs_.empty() || runs_.back().scatter != scatter || run_end_ != offset)
    runs_.push_back({scatter, offset, column_offsets_.size(), 0});
  column_offsets_.push_back(column);
  runs_.back().count++;
  run_end_ = offset + width_bytes;
}

void RecordDecoder::add_dense(const RecordSchema& schema) {
  for (const DenseField& field : schema.dense) {
    const Wire wire = is_swapped(schema) ? dense_wire<true>(field.is_bfloat16) : dense_wire<false>(field.is_bfloat16);
    const std::size_t width_bytes = field.is_bfloat16 ? 2 : 4;
    if (field.is_wanted) {
      const std::size_t column = reserve(sizeof(float));
      add_to_run(wire.scatter, fixed_bytes_, width_bytes, column);
      places_.push_back({Kind::dense, column, 1});
    }
    fixed_bytes_ += width_bytes;
  }
}

void RecordDecoder::add_ids(const RecordSchema& schema) {
  for (const IdsField& field : schema.ids) {
    if (field.length < 1 || field.length > LIST_MAX_LENGTH)
      refuse("length " + std::to_string(field.length) + "; allowed: 1 to " + std::to_string(LIST_MAX_LENGTH));
    const Wire wire = is_swapped(schema) ? ids_wire<true>(field.width_bytes, field.is_signed)
                                         : ids_wire<false>(field.width_bytes, field.is_signed);
    const auto width_bytes = static_cast<std::size_t>(field.width_bytes);
    if (field.is_list) {
      List list{};
      const bool is_short = field.length < 256;
      list.load_length = (is_short             ? ids_wire<false>(1, false)
                          : is_swapped(schema) ? ids_wire<true>(2, false)
                                               : ids_wire<false>(2, false))
                             .load;
      list.widen = wire.widen;
      list.offset = fixed_bytes_;
      list.length_max = field.length;
      list.width_bytes = width_bytes;
      list.is_wanted = field.is_wanted;
      if (field.is_wanted) {
        list.number = wanted_lists_++;
        list.lengths_column = reserve(sizeof(std::int32_t));
        list.values_column = reserve(sizeof(std::int64_t) * field.length);
        places_.push_back({Kind::list, lists_.size(), 0});
      }
      lists_.push_back(list);
      fixed_bytes_ += is_short ? 1 : 2;
      continue;
    }
    if (field.is_wanted) {
      const std::size_t column = reserve(sizeof(std::int64_t) * field.length);
      if (field.length == 1)
        add_to_run(wire.scatter, fixed_bytes_, width_bytes, column);
      else
        fixed_ids_.push_back({wire.widen, fixed_bytes_, field.length, column});
      places_.push_back({Kind::fixed, column, field.length});
      fixed_lengths_[field.length].assign(batch_rows_, static_cast<std::int32_t>(field.length));
    }
    fixed_bytes_ += width_bytes * field.length;
  }
}

void RecordDecoder::add_filters(const RecordSchema& schema, const RowFilters& filters) {
  samples_ = filters.samples;
  for (const KeepRange& filter : filters.ranges) {
    if (filter.dense >= schema.dense.size()) refuse("no dense field " + std::to_string(filter.dense));
    std::size_t offset = schema.is_label_float ? 4 : 1;
    for (std::size_t n = 0; n < filter.dense; n++) offset += schema.dense[n].is_bfloat16 ? 2 : 4;
    const bool is_half = schema.dense[filter.dense].is_bfloat16;
    const Wire wire = is_swapped(schema) ? dense_wire<true>(is_half) : dense_wire<false>(is_half);
    ranges_.push_back({wire.load, offset, filter.low, filter.high});
  }
  for (const KeepLength& filter : filters.lengths) {
    if (filter.ids >= schema.ids.size() || !schema.ids[filter.ids].is_list)
      refuse("no list " + std::to_string(filter.ids));
    const auto before = schema.ids.begin() + static_cast<std::ptrdiff_t>(filter.ids);
    const auto list = std::count_if(schema.ids.begin(), before, [](const IdsField& field) { return field.is_list; });
    bounds_.push_back({static_cast<std::size_t>(list), filter.least, filter.most});
  }
}

bool RecordDecoder::append(std::span<const std::uint8_t> body, std::size_t records, std::uint64_t number,
                           std::uint8_t* memory, Filled& filled) const {
  std::array<std::uint32_t, FIELDS_MAX> lengths;
  const std::uint8_t *at = body.data(), *const end = at + body.size();
  for (std::size_t n = 0; n < records; n++) {
    const std::uint8_t* record = at;
    if (static_cast<std::size_t>(end - record) < fixed_bytes_) return false;
    std::size_t size_bytes = fixed_bytes_;
    for (std::size_t list = 0; list < lists_.size(); list++) {
      lengths[list] = static_cast<std::uint32_t>(lists_[list].load_length(record + lists_[list].offset));
      if (lengths[list] > lists_[list].length_max) return false;
      size_bytes += lengths[list] * lists_[list].width_bytes;
    }
    if (static_cast<std::size_t>(end - record) < size_bytes) return false;
    at = record + size_bytes;
    if (is_kept(record, lengths.data(), number + n)) write(record, lengths.data(), memory, filled);
  }
  return at == end;
}

bool RecordDecoder::is_kept(const std::uint8_t* record, const std::uint32_t* lengths, std::uint64_t number) const {
  for (const Sample& sample : samples_)
    if (splitmix64(sample.seed, number) >> 32 >= sample.below) return false;
  for (const Range& range : ranges_) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(range.load(record + range.offset)));
    if (!(x >= range.low && x <= range.high)) return false;  // so does NaN
  }
  for (const Bounds& bound : bounds_)
    if (lengths[bound.list] < bound.least || lengths[bound.list] > bound.most) return false;
  return true;
}

void RecordDecoder::write(const std::uint8_t* record, const std::uint32_t* lengths, std::uint8_t* memory,
                          Filled& filled) const {
  const std::size_t row = filled.rows++;
  const auto label = static_cast<std::uint32_t>(load_label_(record));
  std::memcpy(memory + labels_column_ + row * sizeof label, &label, sizeof label);
  for (const Run& run : runs_)
    run.scatter(record + run.offset, memory, column_offsets_.data() + run.first, run.count, row);
  for (const FixedIds& ids : fixed_ids_)
    ids.widen(record + ids.offset, memory + ids.column + row * ids.length * sizeof(std::int64_t), ids.length);
  const std::uint8_t* from = record + fixed_bytes_;
  for (std::size_t n = 0; n < lists_.size(); n++) {
    const List& list = lists_[n];
    if (list.is_wanted) {
      std::size_t& ids = filled.ids[list.number];
      std::memcpy(memory + list.lengths_column + row * sizeof lengths[n], &lengths[n], sizeof lengths[n]);
      list.widen(from, memory + list.values_column + ids * sizeof(std::int64_t), lengths[n]);
      ids += lengths[n];
    }
    from += lengths[n] * list.width_bytes;
  }
}

const float* RecordDecoder::labels(const std::uint8_t* memory) const {
  return reinterpret_cast<const float*>(memory + labels_column_);
}

std::vector<Column> RecordDecoder::columns(const std::uint8_t* memory, const Filled& filled) const {
  std::vector<Column> found;
  found.reserve(places_.size());
  for (const Place& place : places_) {
    Column& column = found.emplace_back();
    column.rows = filled.rows;
    if (place.kind == Kind::dense) {
      column.is_dense = true;
      column.dense = reinterpret_cast<const float*>(memory + place.column);
    } else if (place.kind == Kind::fixed) {
      column.lengths = fixed_lengths_.at(place.length).data();
      column.values = reinterpret_cast<const std::int64_t*>(memory + place.column);
      column.count = filled.rows * place.length;
      column.each = place.length;
    } else {
      const List& list = lists_[place.column];
      column.lengths = reinterpret_cast<const std::int32_t*>(memory + list.lengths_column);
      column.values = reinterpret_cast<const std::int64_t*>(memory + list.values_column);
      column.count = filled.ids[list.number];
    }
  }
  return found;
}

}  // namespace sennit::offload
