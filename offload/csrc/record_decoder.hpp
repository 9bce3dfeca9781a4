// SPDX-License-Identifier: Apache-2.0
// Decodes records of any schema into columns. docs/reference/records.md specifies them, offload/records.py is the
// reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "column.hpp"

namespace sennit::offload {

// As in offload/schema.py. "Wanted" fields are those that a plan computes columns from.
struct DenseField {
  bool is_bfloat16 = false;
  bool is_wanted = true;
};

struct IdsField {
  int width_bytes = 4;
  bool is_signed = false;
  std::uint32_t length = 1;  // the number of ids, or the maximum of a list
  bool is_list = false;
  bool is_wanted = true;
};

struct RecordSchema {
  bool is_big_endian = false;
  bool is_label_float = false;
  std::vector<DenseField> dense;
  std::vector<IdsField> ids;
};

// A row that one of these does not keep is dropped (offload/operators.py).
struct Sample {
  std::uint64_t seed;
  std::uint64_t below;
};
struct KeepRange {
  std::size_t dense;  // number of the field
  float low, high;
};
struct KeepLength {
  std::size_t ids;  // number of the field, a list
  std::int64_t least, most;
};
struct RowFilters {
  std::vector<Sample> samples;
  std::vector<KeepRange> ranges;
  std::vector<KeepLength> lengths;
};

// How far the columns of a batch are filled.
struct Filled {
  std::size_t rows = 0;
  std::vector<std::size_t> ids;  // for each wanted list
};

// A schema compiled to a short table of copies, made once. No field is looked up by name for a record.
class RecordDecoder {
 public:
  // Throws std::invalid_argument for an invalid schema, or a filter on an unknown field.
  RecordDecoder(const RecordSchema& schema, const RowFilters& filters, std::size_t batch_rows);

  // Memory for the columns of a batch.
  std::size_t columns_bytes() const { return columns_bytes_; }
  Filled nothing() const { return {0, std::vector<std::size_t>(wanted_lists_)}; }

  // Appends `records` records to the columns at `memory`. False if a list is longer than the schema allows, or if the
  // records do not end with the body. Then `filled` is undefined, and columns are unchanged up to its previous value.
  // `number` is the first record's batch << 32 | row. The caller ensures that no batch gets more than `batch_rows`.
  bool append(std::span<const std::uint8_t> body, std::size_t records, std::uint64_t number, std::uint8_t* memory,
              Filled& filled) const;

  const float* labels(const std::uint8_t* memory) const;
  // The wanted fields in the schema's order, as views.
  std::vector<Column> columns(const std::uint8_t* memory, const Filled& filled) const;

 private:
  // One number each for `count` successive fields, into row `row` of their columns.
  using Scatter = void (*)(const std::uint8_t* from, std::uint8_t* memory, const std::size_t* columns,
                           std::size_t count, std::size_t row);
  // `count` ids, one after another.
  using Widen = void (*)(const std::uint8_t* from, std::uint8_t* to, std::size_t count);
  using Load = std::uint64_t (*)(const std::uint8_t* from);
  struct Wire {
    Load load;
    Scatter scatter;
    Widen widen;
  };
  template <typename Number, bool swapped>
  static Wire ids_wire();
  template <bool swapped>
  static Wire ids_wire(int width_bytes, bool is_signed);
  template <bool swapped>
  static Wire dense_wire(bool is_bfloat16);

  // `offset` is the position in a record's fixed part; columns are offsets in the batch's memory.
  struct Run {
    Scatter scatter;
    std::size_t offset, first, count;  // first, count: in column_offsets_
  };
  struct FixedIds {
    Widen widen;
    std::size_t offset, length, column;
  };
  struct List {
    Load load_length;
    Widen widen;
    std::size_t offset, length_max, width_bytes;
    bool is_wanted;
    std::size_t number, lengths_column, values_column;  // among the wanted fields
  };
  struct Range {
    Load load;
    std::size_t offset;
    float low, high;
  };
  struct Bounds {
    std::size_t list;
    std::int64_t least, most;
  };
  enum class Kind { dense, fixed, list };
  struct Place {
    Kind kind;
    std::size_t column;  // for a list: its index in lists_
    std::size_t length;  // for fixed ids
  };

  void add_dense(const RecordSchema& schema);
  void add_ids(const RecordSchema& schema);
  void add_filters(const RecordSchema& schema, const RowFilters& filters);
  void add_to_run(Scatter scatter, std::size_t offset, std::size_t width_bytes, std::size_t column);
  std::size_t reserve(std::size_t row_bytes);
  bool is_kept(const std::uint8_t* record, const std::uint32_t* lengths, std::uint64_t number) const;
  void write(const std::uint8_t* record, const std::uint32_t* lengths, std::uint8_t* memory, Filled& filled) const;

  std::size_t batch_rows_;
  Load load_label_;
  std::size_t fixed_bytes_ = 0;
  std::size_t labels_column_ = 0;
  std::size_t columns_bytes_ = 0;
  std::size_t wanted_lists_ = 0;
  std::size_t run_end_ = 0;
  std::vector<Run> runs_;
  std::vector<std::size_t> column_offsets_;
  std::vector<FixedIds> fixed_ids_;
  std::vector<List> lists_;
  std::vector<Sample> samples_;
  std::vector<Range> ranges_;
  std::vector<Bounds> bounds_;
  std::vector<Place> places_;
  std::map<std::size_t, std::vector<std::int32_t>> fixed_lengths_;  // for fixed ids, the same for every row
};

}  // namespace sennit::offload
