// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 matrices, in tiles. Plain pointers to memory of the caller.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sennit::kernels {

constexpr std::size_t tile_side = 16;                        // Rows of a tile, and its columns of 32 bits.
constexpr std::size_t tile_depth = 32;                       // Numbers that one instruction sums up.
constexpr std::size_t tile_halves = tile_side * tile_depth;  // bfloat16 numbers of a tile: 1 KiB.

// result[i, j] = Σ_k left[i, k] · right[k, j] over `blocks` of 32. Strides are in elements.
struct TileProducts {
  const std::uint16_t* left;  // bfloat16 [16 row_tiles, 32 blocks].
  std::size_t left_stride;
  // Tiles [block][column tile]: row p of a tile has rows 2 p and 2 p + 1 of 16 columns, the two of a column together.
  const std::uint16_t* right;
  std::size_t right_block_stride, right_tile_stride;
  float* result;  // [16 row_tiles, 16 column_tiles].
  std::size_t result_stride;
  std::size_t row_tiles, column_tiles, blocks;
  bool adds;  // To what the result was, after it.
};

}  // namespace sennit::kernels
