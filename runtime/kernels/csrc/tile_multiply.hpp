// SPDX-License-Identifier: Apache-2.0
// Products of bfloat16 matrices with float32 sums, in the order of the instruction TDPBF16PS (Intel's Architecture
// Instruction Set Extensions, 319433): a tile instruction where the processor has it, else fused multiply-adds that
// give the same bits. docs/reference/attention.md has the arithmetic.
//
// Included once for each instruction set, in a separate namespace.
#pragma once

#include <algorithm>
#include <array>

#include "tile_products.hpp"
#include "wide.hpp"

namespace sennit::kernels::SENNIT_ISA {

#if defined(__AVX2__)
// Numbers below 2^-126 are 0, as operands and as results, while it lives.
class Flushing {
 public:
  Flushing() : before_(_mm_getcsr()) { _mm_setcsr(before_ | denormals_are_zeros | flush_to_zero); }
  ~Flushing() { _mm_setcsr(before_); }
  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;

 private:
  static constexpr unsigned denormals_are_zeros = 0x0040, flush_to_zero = 0x8000;
  unsigned before_;
};

SENNIT_INLINE Wide flushed(const Wide& x) { return x; }
SENNIT_INLINE Wide flushed_fused(const Wide& x, const Wide& y, const Wide& z) { return fused(x, y, z); }
#else
struct Flushing {
  Flushing() {}  // Not trivial, so that one which is only there is no unused variable.
};

SENNIT_INLINE PartWords magnitude(Part x) { return reinterpret_cast<PartWords>(x) & 0x7fffffffu; }
SENNIT_INLINE Part flushed(Part x) {
  const PartWords bits = reinterpret_cast<PartWords>(x);
  return reinterpret_cast<Part>(magnitude(x) < 0x00800000u ? bits & 0x80000000u : bits);
}
SENNIT_INLINE Wide flushed(const Wide& x) {
  return by_parts([&](std::size_t part) SENNIT_INLINE_LAMBDA { return flushed(x.parts[part]); });
}

// Whether a result is too small is decided as if exponents had no limit: above 2^-126 - 2^-151 it rounds to 2^-126.
// A fused multiply-add of numbers with a limit rounds more of them up to there. Products of bfloat16 are exact in
// float64, and so is a sum in question.
[[gnu::noinline]] inline Part flushed_fused(Part x, Part y, Part z) {
  Part sum = fused(x, y, z);
  const PartWords least = magnitude(sum) == 0x00800000u;
  for (std::size_t lane = 0; lane < part_lanes; lane++)
    if (least[lane] != 0) {
      const double exact = double{x[lane]} * double{y[lane]} + double{z[lane]};
      if (exact < 0x1p-126 - 0x1p-151 && -exact < 0x1p-126 - 0x1p-151) sum[lane] *= 0.0f;
    }
  return flushed(sum);
}
SENNIT_INLINE Wide flushed_fused(const Wide& x, const Wide& y, const Wide& z) {
  return by_parts([&](std::size_t part)
                      SENNIT_INLINE_LAMBDA { return flushed_fused(x.parts[part], y.parts[part], z.parts[part]); });
}
#endif

#if defined(__AMX_BF16__)

// Shapes of all tile registers, while it lives: 16 rows of 64 bytes. What a thread leaves in them would be saved
// whenever it sleeps.
class TileRegisters {
 public:
  TileRegisters() {
    alignas(64) std::array<std::uint8_t, 64> shapes{};
    shapes[0] = 1;  // The palette.
    for (std::size_t tile = 0; tile < 8; tile++) shapes[16 + 2 * tile] = 64, shapes[48 + tile] = tile_side;
    _tile_loadconfig(shapes.data());
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// Registers 0 to 3 have the result, 4 and 5 the left, 6 and 7 the right.
template <std::size_t rows, std::size_t columns>
SENNIT_INLINE void multiply_tiles(const TileProducts& p, const std::uint16_t* left, const std::uint16_t* right,
                                  float* result) {
  const std::size_t left_bytes = p.left_stride * 2, result_bytes = p.result_stride * 4;
  const std::uint16_t* lower = left + tile_side * p.left_stride;
  float* below = result + tile_side * p.result_stride;
  if (p.adds) {
    _tile_loadd(0, result, result_bytes);
    if constexpr (columns > 1) _tile_loadd(1, result + tile_side, result_bytes);
    if constexpr (rows > 1) _tile_loadd(2, below, result_bytes);
    if constexpr (rows > 1 && columns > 1) _tile_loadd(3, below + tile_side, result_bytes);
  } else {
    _tile_zero(0);
    if constexpr (columns > 1) _tile_zero(1);
    if constexpr (rows > 1) _tile_zero(2);
    if constexpr (rows > 1 && columns > 1) _tile_zero(3);
  }
  for (std::size_t block = 0; block < p.blocks; block++) {
    _tile_loadd(6, right, 64);
    _tile_loadd(4, left, left_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (columns > 1) {
      _tile_loadd(7, right + p.right_tile_stride, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (rows > 1) {
      _tile_loadd(5, lower, left_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (columns > 1) _tile_dpbf16ps(3, 5, 7);
    }
    left += tile_depth, lower += tile_depth, right += p.right_block_stride;
  }
  _tile_stored(0, result, result_bytes);
  if constexpr (columns > 1) _tile_stored(1, result + tile_side, result_bytes);
  if constexpr (rows > 1) _tile_stored(2, below, result_bytes);
  if constexpr (rows > 1 && columns > 1) _tile_stored(3, below + tile_side, result_bytes);
}

// Needs `TileRegisters`. Not inlined: what it reads must be in memory before.
[[gnu::noipa]] inline void multiply(const TileProducts& p) {
  for (std::size_t r = 0; r < p.row_tiles; r += 2)
    for (std::size_t c = 0; c < p.column_tiles; c += 2) {
      const std::uint16_t* left = p.left + r * tile_side * p.left_stride;
      const std::uint16_t* right = p.right + c * p.right_tile_stride;
      float* result = p.result + r * tile_side * p.result_stride + c * tile_side;
      const bool two_rows = r + 1 < p.row_tiles, two_columns = c + 1 < p.column_tiles;
      if (two_rows && two_columns)
        multiply_tiles<2, 2>(p, left, right, result);
      else if (two_rows)
        multiply_tiles<2, 1>(p, left, right, result);
      else if (two_columns)
        multiply_tiles<1, 2>(p, left, right, result);
      else
        multiply_tiles<1, 1>(p, left, right, result);
    }
}

#else

struct TileRegisters {
  TileRegisters() {}
};

// Rows of a tile whose sums are in registers, two for each.
#if defined(__AVX512F__)
constexpr std::size_t rows_at_a_time = 8;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr std::size_t rows_at_a_time = 2;
#else
constexpr std::size_t rows_at_a_time = 1;
#endif

// The lower or the higher halves of 16 words, as float32.
template <bool high>
SENNIT_INLINE Wide halves_of(const std::uint16_t* pairs) {
  const Wide both = load_wide(reinterpret_cast<const float*>(pairs));
  return flushed(by_parts([&](std::size_t part) SENNIT_INLINE_LAMBDA {
    const PartWords words = reinterpret_cast<PartWords>(both.parts[part]);
    return reinterpret_cast<Part>(high ? words & 0xffff0000u : words << 16);
  }));
}

// A tile of the left, its even columns apart from its odd ones.
struct LeftTile {
  alignas(cache_line_bytes) float even[tile_side][tile_side], odd[tile_side][tile_side];
};

SENNIT_INLINE void unpack(const TileProducts& p, const std::uint16_t* from, LeftTile& tile) {
  for (std::size_t row = 0; row < tile_side; row++) {
    store(tile.even[row], halves_of<false>(from + row * p.left_stride));
    store(tile.odd[row], halves_of<true>(from + row * p.left_stride));
  }
}

SENNIT_INLINE void multiply_block(const LeftTile& left, const std::uint16_t* right, float* result, std::size_t stride,
                                  bool adds) {
  for (std::size_t first = 0; first < tile_side; first += rows_at_a_time) {
    Wide even[rows_at_a_time], odd[rows_at_a_time];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < rows_at_a_time; r++) even[r] = odd[r] = wide(0.0f);
    for (std::size_t pair = 0; pair < tile_side; pair++) {
      const Wide of_even = halves_of<false>(right + pair * tile_depth);
      const Wide of_odd = halves_of<true>(right + pair * tile_depth);
#pragma GCC unroll 8
      for (std::size_t r = 0; r < rows_at_a_time; r++) {
        even[r] = flushed_fused(wide(left.even[first + r][pair]), of_even, even[r]);
        odd[r] = flushed_fused(wide(left.odd[first + r][pair]), of_odd, odd[r]);
      }
    }
#pragma GCC unroll 8
    for (std::size_t r = 0; r < rows_at_a_time; r++) {
      float* to = result + (first + r) * stride;
      const Wide before = adds ? flushed(load_wide(to)) : wide(0.0f);
      store(to, flushed(before + flushed(even[r] + odd[r])));
    }
  }
}

// Not inlined, so that no arithmetic leaves the time in which small numbers are 0.
[[gnu::noipa]] inline void multiply_all(const TileProducts& p) {
  LeftTile tile;
  for (std::size_t r = 0; r < p.row_tiles; r++) {
    float* result = p.result + r * tile_side * p.result_stride;
    if (p.blocks == 0 && !p.adds)
      for (std::size_t row = 0; row < tile_side; row++)
        std::fill_n(result + row * p.result_stride, p.column_tiles * tile_side, 0.0f);
    for (std::size_t block = 0; block < p.blocks; block++) {
      unpack(p, p.left + r * tile_side * p.left_stride + block * tile_depth, tile);
      for (std::size_t c = 0; c < p.column_tiles; c++)
        multiply_block(tile, p.right + block * p.right_block_stride + c * p.right_tile_stride, result + c * tile_side,
                       p.result_stride, p.adds || block > 0);
    }
  }
}

inline void multiply(const TileProducts& p) {
  const Flushing flushing;
  multiply_all(p);
}

#endif

}  // namespace sennit::kernels::SENNIT_ISA
