// SPDX-License-Identifier: Apache-2.0
// Sums rows to pooled vectors (rules 1 and 2 of docs/reference/embedding.md), computes the gradient of weights (rule
// 5), and checks ids.
#pragma once

#include "rounding.hpp"

namespace sennit::kernels::SENNIT_ISA {

// Rows are prefetched this many lookups ahead. If many rows are in the processor's caches, lookups are quick: with 32,
// Zipf took 1.3 times as long. Uniform rows of 256 bytes wait for memory either way and take 1.06 times as long.
constexpr std::size_t lookups_ahead = 64;

// Vectors of a row that are summed in registers at a time.
#if defined(__AVX512F__)
constexpr std::size_t tile_vectors = 8;
#else
constexpr std::size_t tile_vectors = 4;
#endif

SENNIT_INLINE void prefetch(const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += cache_line_bytes) __builtin_prefetch(from + at);
}

// Adds one tile of columns over the bags' rows. The tile's last vector has `last` columns.
template <Precision precision, std::size_t vectors, bool is_weighted, typename Id>
void pool_tile(const Table& table, const Batch& batch, const Block& block, std::size_t column, std::size_t last,
               float* output) {
  const std::size_t row_bytes = table.row_bytes();
  const auto* ids = static_cast<const Id*>(batch.values.data);
  const std::byte* rows = element<precision>(table.weight, column);
  std::size_t lookup = block.first_lookup;
  const std::size_t all_lookups = block.first_lookup + block.lookup_count;
  for (std::size_t bag = 0; bag < block.bag_count; bag++) {
    const std::int64_t length = batch.lengths[block.first_bag + bag];
    Floats sums[vectors] = {};
    for (const std::size_t end = lookup + length; lookup < end; lookup++) {
      if (column == 0 && lookup + lookups_ahead < all_lookups) {
        const std::int64_t next = ids[lookup + lookups_ahead];
        prefetch(table.weight + (next < 0 ? 0 : next) * row_bytes, row_bytes);
      }
      const std::int64_t id = ids[lookup];
      if (id < 0) continue;
      const std::byte* row = rows + id * row_bytes;
      for (std::size_t n = 0; n < vectors; n++) {
        const Floats x = load_row<precision>(element<precision>(row, n * lanes), n + 1 < vectors ? lanes : last);
        sums[n] = is_weighted ? sums[n] + batch.weights[lookup] * x : sums[n] + x;
      }
    }
    if (batch.pooling == Pooling::mean && length > 1)
      for (Floats& sum : sums) sum = sum / static_cast<float>(length);
    float* to = output + bag * table.dim + column;
    for (std::size_t n = 0; n < vectors; n++) store(to + n * lanes, sums[n], n + 1 < vectors ? lanes : last);
  }
}

template <Precision precision, bool is_weighted, typename Id>
void pool(const Table& table, const Batch& batch, const Block& block, float* output) {
  for (std::size_t column = 0; column < table.dim; column += tile_vectors * lanes) {
    const std::size_t rest = table.dim - column;
    const std::size_t columns = rest < tile_vectors * lanes ? rest : tile_vectors * lanes;
    const std::size_t vectors = (columns + lanes - 1) / lanes;
    const std::size_t last = columns - (vectors - 1) * lanes;
    using Tile = void (*)(const Table&, const Batch&, const Block&, std::size_t, std::size_t, float*);
    static constexpr Tile tiles[] = {
      pool_tile<precision, 1, is_weighted, Id>,
      pool_tile<precision, 2, is_weighted, Id>,
      pool_tile<precision, 3, is_weighted, Id>,
      pool_tile<precision, 4, is_weighted, Id>,
#if defined(__AVX512F__)
      pool_tile<precision, 5, is_weighted, Id>,
      pool_tile<precision, 6, is_weighted, Id>,
      pool_tile<precision, 7, is_weighted, Id>,
      pool_tile<precision, 8, is_weighted, Id>,
#endif
    };
    tiles[vectors - 1](table, batch, block, column, last, output);
  }
}

template <Precision precision>
void gather(const Table& table, const Batch& batch, const Block& block, float* output) {
  const std::size_t row_bytes = table.row_bytes();
  for (std::size_t place = 0; place < block.lookup_count; place++) {
    const std::size_t lookup = block.first_lookup + place;
    if (place + lookups_ahead < block.lookup_count) {
      const std::int64_t next = batch.values[lookup + lookups_ahead];
      prefetch(table.weight + (next < 0 ? 0 : next) * row_bytes, row_bytes);
    }
    const std::int64_t id = batch.values[lookup];
    const std::byte* row = table.weight + (id < 0 ? 0 : id) * row_bytes;
    float* to = output + place * table.dim;
    for (std::size_t column = 0; column < table.dim; column += lanes) {
      const std::size_t count = table.dim - column < lanes ? table.dim - column : lanes;
      const Floats x = id < 0 ? Floats{} : load_row<precision>(element<precision>(row, column), count);
      store(to + column, x, count);
    }
  }
}

template <Precision precision>
void lookup_in(const Table& table, const Batch& batch, const Block& block, float* output) {
  if (batch.pooling == Pooling::none) return gather<precision>(table, batch, block, output);
  const bool is_weighted = batch.weights != nullptr, is_wide = batch.values.is_wide;
  if (is_weighted && is_wide) return pool<precision, true, std::int64_t>(table, batch, block, output);
  if (is_weighted) return pool<precision, true, std::int32_t>(table, batch, block, output);
  if (is_wide) return pool<precision, false, std::int64_t>(table, batch, block, output);
  return pool<precision, false, std::int32_t>(table, batch, block, output);
}

inline void lookup(const Table& table, const Batch& batch, const Block& block, float* output) {
  switch (table.precision) {
    case Precision::fp32:
      return lookup_in<Precision::fp32>(table, batch, block, output);
    case Precision::fp16:
      return lookup_in<Precision::fp16>(table, batch, block, output);
    case Precision::bf16:
      return lookup_in<Precision::bf16>(table, batch, block, output);
  }
}

template <typename Id>
bool all_below(const Id* ids, std::size_t count, std::uint64_t row_count) {
  // As unsigned numbers, negative ids are the largest. There is no early exit, so the loop is vectorised.
  std::uint64_t greatest = 0;
  for (std::size_t n = 0; n < count; n++) {
    const auto id = static_cast<std::uint64_t>(std::int64_t{ids[n]});
    greatest = greatest < id ? id : greatest;
  }
  return count == 0 || greatest < row_count;
}

inline bool in_range(const Integers& values, std::size_t first, std::size_t count, std::uint64_t row_count) {
  return values.is_wide ? all_below(static_cast<const std::int64_t*>(values.data) + first, count, row_count)
                        : all_below(static_cast<const std::int32_t*>(values.data) + first, count, row_count);
}

template <Precision precision>
float dot(const Table& table, std::int64_t id, const float* gradient) {
  Floats products[max_dim / lanes];
  const std::size_t count = padded(table.dim) / lanes;
  const std::byte* row = table.weight + id * table.row_bytes();
  for (std::size_t n = 0; n < count; n++) {
    const std::size_t column = n * lanes;
    const std::size_t columns = column >= table.dim ? 0 : table.dim - column < lanes ? table.dim - column : lanes;
    products[n] =
        columns == 0 ? Floats{}
                     : load(gradient + column, columns) * load_row<precision>(element<precision>(row, column), columns);
  }
  return tree_sum(products, count);
}

inline void weight_gradient(const Table& table, const Batch& batch, const Block& block, const float* gradient,
                            float* result) {
  std::size_t place = 0;
  for (std::size_t bag = 0; bag < block.bag_count; bag++) {
    const float* of_bag = gradient + bag * table.dim;
    for (std::int64_t n = batch.lengths[block.first_bag + bag]; n > 0; n--, place++) {
      const std::int64_t id = batch.values[block.first_lookup + place];
      if (id < 0)
        result[place] = 0;
      else if (table.precision == Precision::fp32)
        result[place] = dot<Precision::fp32>(table, id, of_bag);
      else if (table.precision == Precision::fp16)
        result[place] = dot<Precision::fp16>(table, id, of_bag);
      else
        result[place] = dot<Precision::bf16>(table, id, of_bag);
    }
  }
}

}  // namespace sennit::kernels::SENNIT_ISA
