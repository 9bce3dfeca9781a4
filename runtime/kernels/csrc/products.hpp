// SPDX-License-Identifier: Apache-2.0
// The arguments of a fold of matrix products (rule 9 of docs/reference/embedding.md). Plain pointers to memory of the
// caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sennit::kernels {

// Matrices of one shape in one tensor. Members refer to them by number. Strides are in floats.
struct Matrices {
  const float* data;
  std::size_t stride, row_stride, column_stride;
  const std::int64_t* numbers;  // Per member.
};

// Item i is the sum of left · right over the members starts[i] to starts[i + 1], or over member i alone.
struct ProductFold {
  Matrices left;               // [rows, depth].
  Matrices right;              // [depth, columns], whose column stride is 1.
  const std::int64_t* starts;  // Null: one member per item.
  std::size_t items;
  std::size_t rows, depth, columns;
  float* result;  // [items, rows, columns].
};

using FoldProducts = void (*)(const ProductFold&);

// The kernel for one of `available_kernels()`; null if this processor does not have that set.
FoldProducts find_fold_products(std::string_view instruction_set);

}  // namespace sennit::kernels
