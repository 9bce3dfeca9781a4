// SPDX-License-Identifier: Apache-2.0
#include "sketch.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "../../ebpf/include/operators.h"

namespace sennit::offload {
namespace {

// Equal to ebpf/include/sketch.h.
constexpr std::uint64_t SAMPLE_SEED = 0x53414d504c45, HASH_SEED = 0x534b45544348;

using Rows = std::vector<std::size_t>;

Rows sampled_rows(std::uint32_t batch, std::size_t rows, int shift) {
  Rows found;
  const std::uint64_t mask = (std::uint64_t{1} << shift) - 1;
  for (std::uint64_t stratum = 0; stratum << shift < rows; stratum++) {
    const std::uint64_t draw = splitmix64(SAMPLE_SEED, std::uint64_t{batch} << 32 | stratum);
    const std::size_t row = (stratum << shift) + (draw & mask);
    if (row < rows) found.push_back(row);
  }
  return found;
}

Column keep_rows(const Column& from, const Rows& rows) {
  if (from.is_dense) {
    auto numbers = buffer<float>(rows.size());
    for (std::size_t n = 0; n < rows.size(); n++) (*numbers)[n] = from.dense[rows[n]];
    return dense_column(rows.size(), std::move(numbers));
  }
  auto lengths = buffer<std::int32_t>(rows.size());
  std::size_t count = 0;
  for (std::size_t n = 0; n < rows.size(); n++)
    count += static_cast<std::size_t>((*lengths)[n] = from.lengths[rows[n]]);
  auto values = buffer<std::int64_t>(count);
  std::int64_t* to = values->data();
  std::size_t row = 0, begin = 0;
  for (const std::size_t wanted : rows) {
    if (from.each != 0)
      begin = wanted * from.each;
    else
      for (; row < wanted; row++) begin += static_cast<std::size_t>(from.lengths[row]);
    to = std::copy_n(from.values + begin, from.lengths[wanted], to);
  }
  return ids_column(rows.size(), std::move(lengths), count, std::move(values));
}

}  // namespace

std::size_t count_ids(const Receiver& receiver, std::uint32_t batch, const Program& program,
                      const std::vector<std::size_t>& sparse, const SketchShape& shape,
                      std::span<std::uint64_t> counts) {
  if (counts.size() != sparse.size() * shape.depth * shape.width)
    throw std::invalid_argument("counts of " + std::to_string(counts.size()) + " cells for " +
                                std::to_string(sparse.size()) + " tables of " + std::to_string(shape.depth) + " x " +
                                std::to_string(shape.width));
  Receiver::Content content = receiver.content(batch);
  const Rows rows = sampled_rows(content.batch, content.rows, shape.sample_shift);
  for (Column& column : content.columns) column = keep_rows(column, rows);
  const std::vector<Column> columns = program.run(std::move(content.columns));
  std::uint64_t* lines = counts.data();
  for (const std::size_t number : sparse) {
    const Column& column = column_of(columns, number, false);
    for (std::size_t n = 0; n < column.count; n++) {
      const std::uint64_t hash = splitmix64(HASH_SEED, static_cast<std::uint64_t>(column.values[n]));
      for (std::size_t line = 0; line < shape.depth; line++)
        lines[line * shape.width + ((hash >> 16 * line) & (shape.width - 1))]++;
    }
    lines += shape.depth * shape.width;
  }
  return content.rows;
}

}  // namespace sennit::offload
