// SPDX-License-Identifier: Apache-2.0
// The kernels' arguments: tables, a batch, the constants of a step. Plain pointers to memory of the caller.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace sennit::kernels {

enum class Precision : std::uint8_t { fp32, fp16, bf16 };
enum class Pooling : std::uint8_t { sum, mean, none };
// `none` updates nothing: the sums of rows are the result.
enum class Optimizer : std::uint8_t { sgd, adagrad, row_wise_adagrad, adam, partial_row_wise_adam, lamb, ftrl, none };

// 32-bit or 64-bit integers.
struct Integers {
  const void* data = nullptr;
  bool is_wide = false;

  std::int64_t operator[](std::size_t place) const {
    return is_wide ? static_cast<const std::int64_t*>(data)[place] : static_cast<const std::int32_t*>(data)[place];
  }
};

struct Table {
  std::byte* weight;
  std::uint32_t row_count;
  std::uint32_t dim;
  Precision precision;
  std::uint64_t first_row;
  std::uint32_t stream;
  float* states[2];  // In the order of OptimizerSpec.states; null if the optimizer has no such state.
  // Global numbers of the rows if they are lines of a cache. Null: first_row, first_row + 1, ...
  const std::uint64_t* row_numbers = nullptr;

  std::size_t row_bytes() const { return std::size_t{dim} * (precision == Precision::fp32 ? 4 : 2); }
};

// The part of a batch that belongs to one table. Positions count within the whole batch.
struct Block {
  std::uint32_t table;
  std::size_t first_bag, bag_count;
  std::size_t first_lookup, lookup_count;
  std::size_t first_output;  // In floats.
};

struct Batch {
  Integers lengths;
  Integers values;       // Ids in [0, row_count), or negative: ignored.
  const float* weights;  // Null: none.
  Pooling pooling;
  const std::uint16_t* slices = nullptr;  // Per block: its slice of the global batch. Null: all are in one.
};

// StepConstants of optimizers.py, and how weights are stored.
struct Step {
  float rate, scale1, scale2, epsilon, beta1, beta1_rest, beta2, beta2_rest, decay, keep, max_gradient, max_norm, l1;
  bool decay_after;
  bool nesterov;
  bool is_stochastic;
  std::uint32_t number;
  std::uint64_t seed;
};

// One lookup in row order. Its key is the bag for unweighted bags, otherwise the lookup. It is one word, because most
// of sorting is storing these.
class Entry {
 public:
  Entry() = default;
  Entry(std::uint32_t row, std::uint32_t key) : word_(std::uint64_t{row} << 32 | key) {}

  std::uint32_t row() const { return static_cast<std::uint32_t>(word_ >> 32); }
  std::uint32_t key() const { return static_cast<std::uint32_t>(word_); }

 private:
  std::uint64_t word_;
};

// Finds the gradient of an entry: the gradient of its bag, and the factor.
struct Gradients {
  const float* gradient;
  std::size_t dim;
  const std::int64_t* shifts;          // Per block: vector v of the block starts at v * dim + shift.
  const std::uint32_t* block_of;       // Per vector; null if the table has one block, and so a single shift.
  const std::uint32_t* bag_of_lookup;  // Null if keys are vectors.
  const float* weights;                // Per lookup; null: none.
  Integers lengths;                    // Per bag, for a mean; null data otherwise.
  const std::uint16_t* slices;         // Per block; null if all lookups of the table are in one slice.

  // The vector of the gradient that belongs to a key.
  [[gnu::always_inline]] std::size_t vector_of(std::uint32_t key) const {
    return bag_of_lookup == nullptr ? key : bag_of_lookup[key];
  }
  [[gnu::always_inline]] std::uint64_t slice_of(const Entry& entry) const {
    return slices[block_of[vector_of(entry.key())]];
  }
};

// The stack of a sum over the tree of rule 4 (docs/reference/embedding.md). Leaves come from left to right. A leaf's
// number is its slice, above the 32-bit number of its chunk in the slice.
class TreeStack {
 public:
  static constexpr std::size_t slice_levels = 16;

  static constexpr std::uint64_t leaf(std::uint64_t slice, std::uint64_t chunk) { return slice << 32 | chunk; }

  // How many times the two topmost sums are added, before the sum of the leaf is pushed.
  [[gnu::always_inline]] std::size_t push(std::uint64_t leaf) {
    const std::size_t before = depth_;
    if (depth_ != 0) {
      const int level = std::bit_width(last_ ^ leaf);
      while (depth_ > 1 && levels_[depth_ - 1] < level) depth_--;
      levels_[depth_] = static_cast<std::uint8_t>(level);
    }
    last_ = leaf;
    return before - depth_++;
  }
  // Sums on the stack. When all leaves are pushed, they are added from the top.
  [[gnu::always_inline]] std::size_t depth() const { return depth_; }

 private:
  std::uint64_t last_ = 0;
  std::size_t depth_ = 0;
  std::uint8_t levels_[50];  // The level of the node that joins a sum to the one below it. Levels fall upwards.
};

struct BadRows {
  std::uint64_t count = 0;
  std::uint32_t first = 0;
};

// Rows of one table, sorted, with their gradients.
struct RowUpdate {
  const Table* table;
  Optimizer optimizer;
  const Step* step;
  const Entry* entries;
  std::size_t count;
  Gradients gradients;
  float* sums;                 // sum_count(..) vectors of sum_stride(dim) floats.
  float* known_sum = nullptr;  // The summed gradient of a single row, if it has been summed already.
  // For `Optimizer::none`: where numbers and sums of rows go.
  std::int64_t* rows = nullptr;
  float* row_sums = nullptr;
};

constexpr std::size_t chunk_lookups = 32;
constexpr std::size_t lanes = 16;
constexpr std::size_t max_dim = 4096;

// The columns after padding for a sum over columns.
constexpr std::size_t padded(std::size_t dim) {
  std::size_t size = lanes;
  while (size < dim) size *= 2;
  return size;
}

// Whole vectors of `dim` columns.
constexpr std::size_t sum_stride(std::size_t dim) { return (dim + lanes - 1) / lanes * lanes; }

// The most sums on the stack of a run.
constexpr std::size_t sum_count(std::size_t lookups, bool is_sliced) {
  return 1 + std::bit_width((lookups + chunk_lookups - 1) / chunk_lookups) + (is_sliced ? TreeStack::slice_levels : 0);
}

// The kernels as compiled for one instruction set.
struct Kernels {
  const char* name;
  void (*lookup)(const Table&, const Batch&, const Block&, float* output);
  void (*weight_gradient)(const Table&, const Batch&, const Block&, const float* gradient, float* result);
  BadRows (*update)(const RowUpdate&);
  // Sums the gradients of a whole row or a part of it. Returns where in `sums` the result is.
  float* (*sum)(const RowUpdate&);
  // Whether all ids are in [0, row_count).
  bool (*in_range)(const Integers& values, std::size_t first, std::size_t count, std::uint64_t row_count);
  // Converts the weights of a row between fp16 or bf16 and float32.
  void (*narrow_row)(const Table&, const Step&, std::uint32_t row, const float* from, std::byte* to);
  void (*widen_row)(const Table&, const std::byte* from, float* to);
};

}  // namespace sennit::kernels
