// SPDX-License-Identifier: Apache-2.0
// What a fold of matrix products is given (rule 9 of docs/reference/embedding.md). Plain pointers into memory that the
// caller keeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sennit::kernels {

// Matrices of one shape in one tensor, of which members take some by number. Strides are in floats.
struct Matrices {
  const float* data;
  std::size_t stride, row_stride, column_stride;
  const std::int64_t* numbers;  // By member.
};

// Item i is the sum of left · right over the members from starts[i] to starts[i + 1], or over member i alone.
struct ProductFold {
  Matrices left;               // [rows, depth].
  Matrices right;              // [depth, columns], whose column stride is 1.
  const std::int64_t* starts;  // Null: a member an item.
  std::size_t items;
  std::size_t rows, depth, columns;
  float* result;  // [items, rows, columns].
};

using FoldProducts = void (*)(const ProductFold&);

// As compiled for one of `available_kernels()`; null where this processor has none of that name.
FoldProducts find_fold_products(std::string_view instruction_set);

}  // namespace sennit::kernels
