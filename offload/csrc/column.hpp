// SPDX-License-Identifier: Apache-2.0
// A column of a batch: one float per row, or ids with a length per row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace sennit::offload {

template <typename Element>
using Buffer = std::shared_ptr<std::vector<Element>>;

constexpr std::size_t SPARE_BUFFERS_MAX = 256;
constexpr std::size_t SPARE_BYTES_MAX = 64u << 20;
constexpr std::size_t SMALL_BUFFER = 512;  // elements

// Buffers of one type that nobody uses. All threads share them: one thread may read samples ahead, and another one is
// done with them. Never destroyed, because buffers may be returned while their thread ends.
template <typename Element>
class SpareBuffers {
 public:
  using Memory = std::unique_ptr<std::vector<Element>>;

  static SpareBuffers& shared() {
    static auto* spare = new SpareBuffers;
    return *spare;
  }

  // Memory of at least `size` elements; null if there is none. Memory of more than twice the size is left to those who
  // need it.
  Memory take(std::size_t size) {
    const std::lock_guard lock(mutex_);
    for (auto one = spare_.rbegin(); one != spare_.rend(); ++one)
      if ((*one)->size() >= size && (*one)->size() / 2 <= size + SMALL_BUFFER) {
        Memory found = std::move(*one);
        spare_.erase(std::next(one).base());
        bytes_ -= found->size() * sizeof(Element);
        return found;
      }
    return nullptr;
  }

  // The oldest makes room.
  void give(Memory memory) {
    std::vector<Memory> gone;  // freed without the lock
    const std::lock_guard lock(mutex_);
    bytes_ += memory->size() * sizeof(Element);
    spare_.push_back(std::move(memory));
    while (spare_.size() > SPARE_BUFFERS_MAX || bytes_ > SPARE_BYTES_MAX) {
      bytes_ -= spare_.front()->size() * sizeof(Element);
      gone.push_back(std::move(spare_.front()));
      spare_.erase(spare_.begin());
    }
  }

 private:
  std::mutex mutex_;
  std::vector<Memory> spare_;
  std::size_t bytes_ = 0;
};

// At least `size` uninitialised elements. Reuses memory if it can: touching the pages of new memory costs several times
// what an operator needs to fill them.
template <typename Element>
Buffer<Element> buffer(std::size_t size) {
  auto found = SpareBuffers<Element>::shared().take(size);
  if (!found) found = std::make_unique<std::vector<Element>>(size);
  return {found.release(), [](std::vector<Element>* used) {
            SpareBuffers<Element>::shared().give(std::unique_ptr<std::vector<Element>>(used));
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
