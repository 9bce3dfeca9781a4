// SPDX-License-Identifier: Apache-2.0
// Encodes the columns of a data set as records (docs/reference/records.md), one after another. offload/records.py is
// the reference. offload/record_store.py has checked the numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sennit::offload {

struct IdsColumn {
  const void* values = nullptr;
  bool is_wide = false;  // int64, else int32
  // [rows + 1]: the index of each row's first id. nullptr: every row has `length` ids, and the field is not a list.
  const std::int64_t* offsets = nullptr;
  std::size_t length = 1;
  std::size_t width_bytes = 4;   // on the wire: 1, 2, 4 or 8
  std::size_t length_bytes = 0;  // bytes of a list's length on the wire: 1 or 2
};

struct RecordColumns {
  std::size_t rows = 0;
  bool is_big_endian = false;
  const float* labels = nullptr;
  bool is_binary = true;          // the label is a byte, else float32
  const float* dense = nullptr;   // [rows, D], row after row
  std::vector<bool> is_bfloat16;  // for each of the D
  std::vector<IdsColumn> ids;     // in the schema's order

  // Bytes of a record without the ids of its lists.
  std::size_t fixed_bytes() const;
  bool has_lists() const;
};

// Bytes of all records together.
std::uint64_t encoded_bytes(const RecordColumns& columns);

// `out` has encoded_bytes() bytes. `starts`, [rows + 1], receives each record's offset. It may be empty without lists,
// because then all records have fixed_bytes().
void encode_records(const RecordColumns& columns, std::span<std::byte> out, std::span<std::uint64_t> starts);

}  // namespace sennit::offload
