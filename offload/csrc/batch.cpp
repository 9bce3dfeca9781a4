// SPDX-License-Identifier: Apache-2.0
#include "batch.hpp"

#include <algorithm>
#include <utility>

namespace sennit::offload {
namespace {

// The memory of a passed-through field is the slot's. The batch outlives the slot, so it gets a copy.
template <typename Element>
Buffer<Element> owned(const Element* data, std::size_t size, const Buffer<Element>& owner) {
  if (owner) return owner;
  auto copy = buffer<Element>(size);
  std::copy_n(data, size, copy->data());
  return copy;
}

}  // namespace

Batch make_batch(const Receiver& receiver, std::uint32_t number, const Program& program,
                 const std::vector<std::size_t>& dense, const std::vector<std::size_t>& sparse) {
  Receiver::Content content = receiver.content(number);
  Batch batch;
  const std::size_t rows = batch.rows = content.rows;
  batch.labels = owned<float>(content.labels, rows, nullptr);
  const std::vector<Column> columns = program.run(std::move(content.columns));

  batch.dense = buffer<float>(rows * dense.size());
  std::vector<const float*> numbers;
  for (const std::size_t column : dense) numbers.push_back(column_of(columns, column, true).dense);
  float* to = batch.dense->data();
  for (std::size_t row = 0; row < rows; row++)
    for (const float* from : numbers) *to++ = from[row];

  batch.lengths = buffer<std::int32_t>(rows * sparse.size());
  std::int32_t* lengths = batch.lengths->data();
  for (const std::size_t number_of_column : sparse) {
    const Column& column = column_of(columns, number_of_column, false);
    lengths = std::copy_n(column.lengths, rows, lengths);
    batch.values.push_back({column.count, owned(column.values, column.count, column.own_values)});
  }
  return batch;
}

}  // namespace sennit::offload
