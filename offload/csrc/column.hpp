// SPDX-License-Identifier: Apache-2.0
// A column of a batch: one float per row, or ids with a length per row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

namespace sennit::offload {

template <typename Element>
using Buffer = std::shared_ptr<std::vector<Element>>;

constexpr std::size_t SPARE_BUFFERS_MAX = 256;
constexpr std::size_t SMALL_BUFFER = 512;  // elements

// One cache per thread. Never destroyed, because buffers may be returned while their thread ends.
template <typename Element>
std::vector<std::unique_ptr<std::vector<Element>>>& spare_buffers() {
  static thread_local auto* spare = new std::vector<std::unique_ptr<std::vector<Element>>>;
  return *spare;
}

// At least `size` uninitialised elements. Reuses memory if it can: touching the pages of new memory costs several times
// what an operator needs to fill them. Memory of more than twice the size is left to those who need it.
template <typename Element>
Buffer<Element> buffer(std::size_t size) {
  auto& spare = spare_buffers<Element>();
  std::unique_ptr<std::vector<Element>> found;
  for (auto one = spare.rbegin(); one != spare.rend() && !found; ++one)
    if ((*one)->size() >= size && (*one)->size() / 2 <= size + SMALL_BUFFER) {
      found = std::move(*one);
      spare.erase(std::next(one).base());
    }
  if (!found) found = std::make_unique<std::vector<Element>>(size);
  return {found.release(), [](std::vector<Element>* used) {
            std::unique_ptr<std::vector<Element>> owned(used);
            // Returns to the cache of the releasing thread, which may not be the allocating one. The oldest makes room.
            auto& back = spare_buffers<Element>();
            if (back.size() == SPARE_BUFFERS_MAX) back.erase(back.begin());
            back.push_back(std::move(owned));
          }};
}

// Memory that the column allocated lives as long as any column that uses it.
struct Column {
  bool is_dense = false;
  std::size_t rows = 0;
  const float* dense = nullptr;
  const std::int32_t* lengths = nullptr;
  const std::int64_t* values = nullptr;
  std::size_t count = 0;  // of values
  std::size_t each = 0;   // ids of every row; 0: lengths may differ

  Buffer<float> own_dense;
  Buffer<std::int32_t> own_lengths;
  Buffer<std::int64_t> own_values;
};

inline Column dense_column(std::size_t rows, Buffer<float> numbers) {
  Column made;
  made.is_dense = true;
  made.rows = rows;
  made.dense = numbers->data();
  made.own_dense = std::move(numbers);
  return made;
}

// A column with new lengths.
inline Column ids_column(std::size_t rows, Buffer<std::int32_t> lengths, std::size_t count,
                         Buffer<std::int64_t> values) {
  Column made;
  made.rows = rows;
  made.count = count;
  made.lengths = lengths->data();
  made.values = values->data();
  made.own_lengths = std::move(lengths);
  made.own_values = std::move(values);
  return made;
}

// A column with new ids and the same lengths.
inline Column same_lengths(const Column& of, Buffer<std::int64_t> values) {
  Column made = of;
  made.values = values->data();
  made.own_values = std::move(values);
  return made;
}

}  // namespace sennit::offload
