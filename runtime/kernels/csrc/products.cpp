// SPDX-License-Identifier: Apache-2.0
// Folds of matrix products (rule 9 of docs/reference/embedding.md). Rows and columns of a result are summed side by
// side in registers; members, and the depth of their matrices, one after another. Compiled once for each instruction
// set.
#include "products.hpp"

#include "vector.hpp"

namespace sennit::kernels::SENNIT_ISA {

void fold_products(const ProductFold& fold);

// The matrices of members are prefetched this many members ahead.
constexpr std::size_t members_ahead = 4;

// Rows and vectors of a result kept in registers.
#if defined(__AVX512F__)
constexpr std::size_t product_rows = 8, product_vectors = 2;
#elif defined(__AVX2__)
constexpr std::size_t product_rows = 4, product_vectors = 1;
#else
constexpr std::size_t product_rows = 2, product_vectors = 1;
#endif

SENNIT_INLINE void prefetch_matrix(const Matrices& matrices, std::size_t member, std::size_t floats) {
  const float* from = matrices.data + matrices.numbers[member] * matrices.stride;
  for (std::size_t at = 0; at < floats; at += cache_line_bytes / sizeof(float)) __builtin_prefetch(from + at);
}

// The tile of one item that begins at `row` and `column`. Its last vector has `last` columns.
template <std::size_t rows, std::size_t vectors>
SENNIT_INLINE void product_tile(const ProductFold& fold, std::size_t item, std::size_t row, std::size_t column,
                                std::size_t last) {
  Floats sums[rows][vectors] = {};
  const std::size_t begin = fold.starts == nullptr ? item : fold.starts[item];
  const std::size_t end = fold.starts == nullptr ? item + 1 : fold.starts[item + 1];
  for (std::size_t member = begin; member < end; member++) {
    const float* left = fold.left.data + fold.left.numbers[member] * fold.left.stride + row * fold.left.row_stride;
    const float* right = fold.right.data + fold.right.numbers[member] * fold.right.stride + column;
    for (std::size_t k = 0; k < fold.depth; k++) {
      Floats of_right[vectors];
      for (std::size_t v = 0; v < vectors; v++)
        of_right[v] = load(right + k * fold.right.row_stride + v * lanes, v + 1 < vectors ? lanes : last);
      for (std::size_t x = 0; x < rows; x++) {
        const float of_left = left[x * fold.left.row_stride + k * fold.left.column_stride];
        for (std::size_t v = 0; v < vectors; v++) sums[x][v] = sums[x][v] + of_left * of_right[v];
      }
    }
  }
  float* to = fold.result + (item * fold.rows + row) * fold.columns + column;
  for (std::size_t x = 0; x < rows; x++)
    for (std::size_t v = 0; v < vectors; v++)
      store(to + x * fold.columns + v * lanes, sums[x][v], v + 1 < vectors ? lanes : last);
}

template <std::size_t rows>
void product_rows_of(const ProductFold& fold, std::size_t item, std::size_t row) {
  std::size_t column = 0;
  for (; column + product_vectors * lanes <= fold.columns; column += product_vectors * lanes)
    product_tile<rows, product_vectors>(fold, item, row, column, lanes);
  for (; column < fold.columns; column += lanes) {
    const std::size_t rest = fold.columns - column;
    product_tile<rows, 1>(fold, item, row, column, rest < lanes ? rest : lanes);
  }
}

void fold_products(const ProductFold& fold) {
  const std::size_t left_floats = fold.rows * fold.depth, right_floats = fold.depth * fold.columns;
  const std::size_t members = fold.starts == nullptr ? fold.items : static_cast<std::size_t>(fold.starts[fold.items]);
  std::size_t fetched = fold.starts == nullptr || fold.items == 0 ? 0 : static_cast<std::size_t>(fold.starts[0]);
  for (std::size_t item = 0; item < fold.items; item++) {
    const std::size_t end = fold.starts == nullptr ? item + 1 : fold.starts[item + 1];
    for (; fetched < members && fetched < end + members_ahead; fetched++) {
      prefetch_matrix(fold.left, fetched, left_floats);
      prefetch_matrix(fold.right, fetched, right_floats);
    }
    std::size_t row = 0;
    for (; row + product_rows <= fold.rows; row += product_rows) product_rows_of<product_rows>(fold, item, row);
    if constexpr (product_rows > 4)
      for (; row + 4 <= fold.rows; row += 4) product_rows_of<4>(fold, item, row);
    if constexpr (product_rows > 2)
      for (; row + 2 <= fold.rows; row += 2) product_rows_of<2>(fold, item, row);
    for (; row < fold.rows; row++) product_rows_of<1>(fold, item, row);
  }
}

}  // namespace sennit::kernels::SENNIT_ISA
