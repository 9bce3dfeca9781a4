// SPDX-License-Identifier: Apache-2.0
// Columns of a data set -> records as docs/reference/records.md has them, one behind the other. offload/records.py is
// the reference, and offload/record_store.py checks the numbers before they come here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace sennit::offload {

struct IdsColumn {
  const void* values = nullptr;
  bool is_wide = false;  // int64, else int32
  // [rows + 1]: where the ids of each row begin. nullptr: every row has `length` of them, and the field is no list.
  const std::int64_t* offsets = nullptr;
  std::size_t length = 1;
  std::size_t width_bytes = 4;   // on the wire: 1, 2, 4 or 8
  std::size_t length_bytes = 0;  // of a list's length on the wire: 1 or 2
};

struct RecordColumns {
  std::size_t rows = 0;
  bool is_big_endian = false;
  const float* labels = nullptr;
  bool is_binary = true;          // the label is a byte, else float32
  const float* dense = nullptr;   // [rows, D], row after row
  std::vector<bool> is_bfloat16;  // of each of the D
  std::vector<IdsColumn> ids;     // in the schema's order

  // Of a record without the ids of its lists.
  std::size_t fixed_bytes() const;
  bool has_lists() const;
};

// Of all records together.
std::uint64_t encoded_bytes(const RecordColumns& columns);

// `out` has encoded_bytes() bytes. `starts`, [rows + 1], is told where each record begins; it may be empty where there
// are no lists, and so all records have fixed_bytes().
void encode_records(const RecordColumns& columns, std::span<std::byte> out, std::span<std::uint64_t> starts);

}  // namespace sennit::offload
