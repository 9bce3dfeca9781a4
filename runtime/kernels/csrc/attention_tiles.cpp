// SPDX-License-Identifier: Apache-2.0
// Attention of bfloat16 for one head of one sequence, by products of tiles (docs/reference/attention.md). Weights of
// positions that do not attend are 0 in them. So numbers that are infinite or NaN, which do not vanish beside a 0, take
// another way. Compiled once for each instruction set.
#include "attention_head.hpp"
#include "tile_multiply.hpp"

namespace sennit::kernels::SENNIT_ISA {

namespace {

// Rows of scores that are held at a time: the depth of a tile, so that they are one block of sums over rows.
constexpr std::size_t band_rows = tile_depth;

SENNIT_INLINE Wide widened(const std::uint16_t* from) {
  return wide_of(floats_of(widen(load_halves(from, lanes)) << 16));
}

// Weights as operands: to nearest even, and those below 2^-126 are 0.
SENNIT_INLINE Halves narrowed(const Wide& x) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<Halves>(_mm512_cvtneps_pbh(x.parts[0]));
#else
  const Words bits = bits_of(floats_of(x));
  return to_bf16(floats_of(choose(below(bits & 0x7fffffffu, 0x00800000), Words{}, bits)));
#endif
}

SENNIT_INLINE void store_words(void* to, Words x) { std::memcpy(to, &x, sizeof x); }
SENNIT_INLINE Words load_words(const void* from) {
  Words x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

// Rows of a sequence as operands of products. [rows, dim], both in whole blocks, zeros behind.
struct Operand {
  std::uint16_t* rows;
  std::size_t stride, dim;
  bool is_finite;

  std::size_t blocks() const { return stride / tile_depth; }
  std::size_t column_tiles() const { return up(dim) / tile_side; }
};

class TileTask : AttentionHead {
 public:
  TileTask(const Attention& attention, std::size_t sequence, std::size_t head)
      : AttentionHead(attention, sequence, head), padded_(up(length_, tile_depth)) {}

  void attend(const AttentionResult& result, AttentionScratch& scratch) {
    Pieces pieces(scratch);
    const Operand query = pack(attention_.query, pieces), key = pack(attention_.key, pieces);
    const Operand value = pack(attention_.value, pieces);
    const std::uint16_t *keys = turned_tiles(key, pieces), *values = paired_tiles(value, pieces);
    const std::size_t columns = most_columns(band_rows, tile_depth) + band_rows, width = up(width_);
    float* scores = pieces.take(band_rows * columns);
    std::uint16_t* weights = pieces.take_halves(band_rows * columns);
    float* sums = pieces.take(band_rows * width);
    take_bias(columns, pieces);
    const TileRegisters registers;
    for (std::size_t first = 0; first < length_; first += band_rows) {
      const Band band = band_at(first);
      std::array<float, band_rows> own{};
      multiply_rows(band, query, keys, scores);
      take_own(band, scores, own.data());
      std::fill_n(weights, band_rows * band.width(), std::uint16_t{0});
      const ScoreBlock block = scores_of(band, scores, own.data());
      make_weights(block, result.statistics, [&](std::size_t i) SENNIT_INLINE_LAMBDA {
        return [to = weights + (i - first) * band.width() - band.columns.begin](std::size_t j, const Wide& weight,
                                                                                const auto& mask)
                   SENNIT_INLINE_LAMBDA { store_halves(to + j, narrowed(only(weight, mask)), lanes); };
      });
      for (std::size_t i = std::max(history_, first); i < band.rows.end; i++)
        weights[(i - first) * band.width() + band.own_column(i) - band.columns.begin] = narrowed(wide(block.own(i)))[0];
      sum_rows(band, weights, value, values, sums);
      store_rows(band, sums, width, result.output);
    }
  }

  void differentiate(const AttentionGradients& gradients, std::size_t sequence, AttentionScratch& scratch) {
    Pieces pieces(scratch);
    const Operand query = pack(attention_.query, pieces), key = pack(attention_.key, pieces);
    const Operand value = pack(attention_.value, pieces), arriving = pack(gradients.output, pieces);
    const std::uint16_t *keys = turned_tiles(key, pieces), *values = turned_tiles(value, pieces);
    const std::uint16_t* key_pairs = paired_tiles(key, pieces);
    const std::uint16_t* turned_query = turned_rows(query, paired_tiles(query, pieces), pieces);
    const std::uint16_t* turned_arriving = turned_rows(arriving, paired_tiles(arriving, pieces), pieces);
    // Columns of the gradients are rows here.
    float* key_gradient = pieces.take_zeros(up(depth_) * padded_);
    float* value_gradient = pieces.take_zeros(up(width_) * padded_);
    const std::size_t columns = most_columns(band_rows, tile_depth) + band_rows, depth = up(depth_);
    float* weights = pieces.take(band_rows * columns);
    float* scores = pieces.take(band_rows * columns);
    std::uint16_t* weight_pairs = pieces.take_halves(band_rows * columns);
    std::uint16_t* score_pairs = pieces.take_halves(band_rows * columns);
    std::uint16_t* score_rows = pieces.take_halves(band_rows * columns);
    float* sums = pieces.take(band_rows * depth);
    take_bias(columns, pieces, gradient_of_bias(gradients, sequence));
    const TileRegisters registers;
    for (std::size_t first = 0; first < length_; first += band_rows) {
      const Band band = band_at(first);
      std::array<float, band_rows> own_weight{}, own_score{};
      multiply_rows(band, query, keys, weights);
      multiply_rows(band, arriving, values, scores);
      take_own(band, weights, own_weight.data());
      take_own(band, scores, own_score.data());
      for (std::uint16_t* operand : {weight_pairs, score_pairs, score_rows})
        std::fill_n(operand, band_rows * band.width(), std::uint16_t{0});
      const ScoreBlock of_weights = scores_of(band, weights, own_weight.data());
      const ScoreBlock of_products = scores_of(band, scores, own_score.data());
      const std::size_t begin = band.columns.begin;
      differentiate_weights(
          of_weights, of_products, gradients.statistics,
          [&](std::size_t i) SENNIT_INLINE_LAMBDA {
            const std::size_t r = i - first;
            return [to = score_rows + r * band.width() - begin, weight_pair = weight_pairs + pair_of(r, 0),
                    score_pair = score_pairs + pair_of(r, 0), begin, is_odd = r % 2 != 0](
                       std::size_t j, const Wide& x, const Wide& of_product, const auto& mask) SENNIT_INLINE_LAMBDA {
              const Halves of_row = narrowed(only(of_product, mask));
              store_halves(to + j, of_row, lanes);
              const std::size_t at = pair_of(0, j - begin);
              put_pair(weight_pair + at, widen(narrowed(only(x, mask))), is_odd);
              put_pair(score_pair + at, widen(of_row), is_odd);
            };
          },
          [&](std::size_t i) SENNIT_INLINE_LAMBDA {
            if (i < history_) return;
            const std::size_t r = i - first, column = band.own_column(i) - begin;
            const std::size_t at = pair_of(r, down(column)) + column % lanes * 2 + r % 2;
            score_rows[r * band.width() + column] = score_pairs[at] = narrowed(wide(own_score[r]))[0];
            weight_pairs[at] = narrowed(wide(own_weight[r]))[0];
          });
      sum_rows(band, score_rows, key, key_pairs, sums);
      store_rows(band, sums, depth, gradients.query);
      sum_columns(band, weight_pairs, arriving, turned_arriving, value_gradient);
      sum_columns(band, score_pairs, query, turned_query, key_gradient);
    }
    store_turned(key_gradient, gradients.key);
    store_turned(value_gradient, gradients.value);
    store_bias_gradient();
  }

 private:
  // 32 rows of scores, and the columns that any of them needs, in whole blocks. Candidates meet themselves in one block
  // more where those do not reach them.
  struct Band {
    Span rows, columns;
    bool is_apart;

    std::size_t history_width() const { return columns.end - columns.begin; }
    std::size_t width() const { return history_width() + (is_apart ? band_rows : 0); }
    std::size_t own_column(std::size_t i) const { return is_apart ? columns.end + (i - rows.begin) : i; }
  };

  Band band_at(std::size_t first) const {
    const Span rows{first, std::min(length_, first + band_rows)};
    const Span columns = columns_of_rows(rows, tile_depth);
    return {rows, columns, columns.end <= first};
  }

  static ScoreBlock scores_of(const Band& band, float* scores, float* own) {
    return {band.rows, band.columns.begin, band.width(), scores, own};
  }

  // Those of candidates with themselves, which stand among all others.
  void take_own(const Band& band, const float* products, float* own) const {
    for (std::size_t i = std::max(history_, band.rows.begin); i < band.rows.end; i++)
      own[i - band.rows.begin] =
          products[(i - band.rows.begin) * band.width() + band.own_column(i) - band.columns.begin];
  }

  // Where a row's half of the words of 16 columns begins, in halves: tiles of 16 columns, in each of them pairs of
  // rows.
  static std::size_t pair_of(std::size_t row, std::size_t column) {
    return column / lanes * tile_halves + row / 2 * tile_depth;
  }

  // The halves of an even row, then those of the row behind it.
  SENNIT_INLINE_MEMBER static void put_pair(std::uint16_t* pair, Words halves, bool is_odd) {
    store_words(pair, is_odd ? load_words(pair) | halves << 16 : halves);
  }

  static constexpr std::size_t rows_ahead = 8;

  std::uint16_t* address(const HeadRows& rows, std::size_t i) const {
    return static_cast<std::uint16_t*>(rows.data) + start_of(rows, i);
  }

  Operand pack(const HeadRows& rows, Pieces& pieces) const {
    const std::size_t stride = up(rows.dim, tile_depth);
    std::uint16_t* packed = pieces.take_halves(padded_ * stride);
    const std::size_t dim = rows.dim;
    Halves not_finite{};
    for (std::size_t i = 0; i < length_; i++) {
      // The processor does not guess a head's part of the next row: other heads' lie between.
      if (i + rows_ahead < length_)
        for (std::size_t column = 0; column < dim; column += tile_depth)
          __builtin_prefetch(address(rows, i + rows_ahead) + column);
      const std::uint16_t* from = address(rows, i);
      std::uint16_t* to = packed + i * stride;
      std::size_t column = 0;
      for (; column < dim; column += lanes) {
        const Halves x = load_halves(from + column, dim - column);
        store_halves(to + column, x, lanes);
        not_finite |= reinterpret_cast<Halves>((x & 0x7f80) == 0x7f80);
      }
      std::fill_n(to + column, stride - column, std::uint16_t{0});
    }
    std::fill_n(packed + length_ * stride, (padded_ - length_) * stride, std::uint16_t{0});
    bool is_finite = true;
    for (std::size_t lane = 0; lane < lanes; lane++) is_finite = is_finite && not_finite[lane] == 0;
    return {packed, stride, dim, is_finite};
  }

  // For products over the dim: tiles [row tile][block], with the rows as columns.
  const std::uint16_t* turned_tiles(const Operand& operand, Pieces& pieces) const {
    std::uint16_t* tiles = pieces.take_halves(padded_ * operand.stride);
    std::uint16_t* to = tiles;
    for (std::size_t row = 0; row < padded_; row += tile_side)
      for (std::size_t column = 0; column < operand.stride; column += tile_depth, to += tile_halves)
        transpose(words(operand.rows + row * operand.stride + column), operand.stride / 2, words(to), tile_side);
    return tiles;
  }

  // For products over the rows: tiles [block][column tile].
  const std::uint16_t* paired_tiles(const Operand& operand, Pieces& pieces) const {
    const std::size_t columns = up(operand.dim);
    std::uint16_t* tiles = pieces.take_halves(padded_ * columns);
    std::uint16_t* to = tiles;
    for (std::size_t block = 0; block < padded_; block += tile_depth)
      for (std::size_t column = 0; column < columns; column += tile_side)
        for (std::size_t pair = 0; pair < tile_side; pair++, to += tile_depth) {
          const std::uint16_t* from = operand.rows + (block + 2 * pair) * operand.stride + column;
          store_words(to, widen(load_halves(from, lanes)) | widen(load_halves(from + operand.stride, lanes)) << 16);
        }
    return tiles;
  }

  // [columns, rows].
  const std::uint16_t* turned_rows(const Operand& operand, const std::uint16_t* pairs, Pieces& pieces) const {
    const std::size_t columns = up(operand.dim);
    std::uint16_t* turned = pieces.take_halves(columns * padded_);
    for (std::size_t block = 0; block < padded_; block += tile_depth)
      for (std::size_t column = 0; column < columns; column += tile_side, pairs += tile_halves)
        transpose(words(pairs), tile_side, words(turned + column * padded_ + block), padded_ / 2);
    return turned;
  }

  static const float* words(const std::uint16_t* halves) { return reinterpret_cast<const float*>(halves); }
  static float* words(std::uint16_t* halves) { return reinterpret_cast<float*>(halves); }

  // left[i] · right[j] for all rows and columns of the band.
  void multiply_rows(const Band& band, const Operand& left, const std::uint16_t* right, float* products) const {
    const std::size_t tile_row = left.blocks() * tile_halves;
    TileProducts all{.left = left.rows + band.rows.begin * left.stride,
                     .left_stride = left.stride,
                     .right = right + band.columns.begin / tile_side * tile_row,
                     .right_block_stride = tile_halves,
                     .right_tile_stride = tile_row,
                     .result = products,
                     .result_stride = band.width(),
                     .row_tiles = band_rows / tile_side,
                     .column_tiles = band.history_width() / tile_side,
                     .blocks = left.blocks(),
                     .adds = false};
    multiply(all);
    if (!band.is_apart) return;
    all.right = right + band.rows.begin / tile_side * tile_row;
    all.result += band.history_width();
    all.column_tiles = band_rows / tile_side;
    multiply(all);
  }

  // sums[i] = Σ_j weights[i, j] · rows[j].
  void sum_rows(const Band& band, const std::uint16_t* weights, const Operand& rows, const std::uint16_t* pairs,
                float* sums) const {
    const std::size_t tiles = rows.column_tiles(), block_halves = tiles * tile_halves;
    if (!rows.is_finite) {
      const Flushing flushing;
      return sum_rows_that_attend(band, weights, rows, sums);
    }
    TileProducts all{.left = weights,
                     .left_stride = band.width(),
                     .right = pairs + band.columns.begin / tile_depth * block_halves,
                     .right_block_stride = block_halves,
                     .right_tile_stride = tile_halves,
                     .result = sums,
                     .result_stride = tiles * tile_side,
                     .row_tiles = band_rows / tile_side,
                     .column_tiles = tiles,
                     .blocks = band.history_width() / tile_depth,
                     .adds = false};
    multiply(all);
    if (!band.is_apart) return;
    all.left += band.history_width();
    all.right = pairs + band.rows.begin / tile_depth * block_halves;
    all.blocks = 1;
    all.adds = true;
    multiply(all);
  }

  // sums[·, j] += Σ_i weights[i, j] · rows[i].
  void sum_columns(const Band& band, const std::uint16_t* weight_pairs, const Operand& rows,
                   const std::uint16_t* turned, float* sums) const {
    if (!rows.is_finite) {
      const Flushing flushing;
      return sum_columns_that_attend(band, weight_pairs, rows, sums);
    }
    TileProducts all{.left = turned + band.rows.begin,
                     .left_stride = padded_,
                     .right = weight_pairs,
                     .right_block_stride = 0,
                     .right_tile_stride = tile_halves,
                     .result = sums + band.columns.begin,
                     .result_stride = padded_,
                     .row_tiles = rows.column_tiles(),
                     .column_tiles = band.history_width() / tile_side,
                     .blocks = 1,
                     .adds = true};
    multiply(all);
    if (!band.is_apart) return;
    all.right += band.history_width() / tile_side * tile_halves;
    all.result = sums + band.rows.begin;
    all.column_tiles = band_rows / tile_side;
    multiply(all);
  }

  bool attends(std::size_t i, std::size_t j) const {
    const Span span = attended(i);
    return i == j || (span.begin <= j && j < span.end);
  }

  // One block of 32 products, of those pairs alone that attend: the sums of both parities, and what it adds to.
  template <typename Weight, typename Row, typename Attends>
  Wide add_block(const Wide& before, Weight weight, Row row, Attends is_in) const {
    Wide sums[2] = {wide(0.0f), wide(0.0f)};
    for (std::size_t k = 0; k < tile_depth; k++)
      if (is_in(k)) sums[k % 2] = flushed_fused(flushed(wide(weight(k))), flushed(row(k)), sums[k % 2]);
    return flushed(before + flushed(sums[0] + sums[1]));
  }

  static float float_of(std::uint16_t half) { return std::bit_cast<float>(std::uint32_t{half} << 16); }

  [[gnu::noipa]] void sum_rows_that_attend(const Band& band, const std::uint16_t* weights, const Operand& rows,
                                           float* sums) const {
    const std::size_t width = up(rows.dim);
    std::fill_n(sums, band_rows * width, 0.0f);
    for (std::size_t i = band.rows.begin; i < band.rows.end; i++)
      for (std::size_t at = 0; at < band.width(); at += tile_depth) {
        const std::uint16_t* of_row = weights + (i - band.rows.begin) * band.width() + at;
        const std::size_t j = at < band.history_width() ? band.columns.begin + at : band.rows.begin;
        for (std::size_t column = 0; column < width; column += lanes) {
          float* to = sums + (i - band.rows.begin) * width + column;
          store(to, add_block(
                        load_wide(to), [&](std::size_t k) { return float_of(of_row[k]); },
                        [&](std::size_t k) { return widened(rows.rows + (j + k) * rows.stride + column); },
                        [&](std::size_t k) { return j + k < length_ && attends(i, j + k); }));
        }
      }
  }

  [[gnu::noipa]] void sum_columns_that_attend(const Band& band, const std::uint16_t* weight_pairs, const Operand& rows,
                                              float* sums) const {
    for (std::size_t at = 0; at < band.width(); at++) {
      const std::size_t j =
          at < band.history_width() ? band.columns.begin + at : band.rows.begin + (at - band.history_width());
      if (j >= length_) continue;
      for (std::size_t column = 0; column < up(rows.dim); column += lanes) {
        alignas(cache_line_bytes) float before[lanes];
        for (std::size_t lane = 0; lane < lanes; lane++) before[lane] = sums[(column + lane) * padded_ + j];
        store(
            before,
            add_block(
                load_wide(before),
                [&](std::size_t k) { return float_of(weight_pairs[pair_of(k, at) + at % lanes * 2 + k % 2]); },
                [&](std::size_t k) { return widened(rows.rows + (band.rows.begin + k) * rows.stride + column); },
                [&](std::size_t k) { return band.rows.begin + k < band.rows.end && attends(band.rows.begin + k, j); }));
        for (std::size_t lane = 0; lane < lanes; lane++) sums[(column + lane) * padded_ + j] = before[lane];
      }
    }
  }

  void store_row(const HeadRows& rows, std::size_t i, std::size_t column, const Wide& x) const {
    // Whether a sum of nothing is -0 or +0 depends on what is not in it.
    store_halves(address(rows, i) + column, to_bf16(floats_of(x + wide(0.0f))), rows.dim - column);
  }

  void store_rows(const Band& band, const float* sums, std::size_t stride, const HeadRows& rows) const {
    for (std::size_t i = band.rows.begin; i < band.rows.end; i++)
      for (std::size_t column = 0; column < rows.dim; column += lanes)
        store_row(rows, i, column, load_wide(sums + (i - band.rows.begin) * stride + column));
  }

  void store_turned(const float* sums, const HeadRows& rows) const {
    alignas(cache_line_bytes) float part[lanes * lanes];
    for (std::size_t first = 0; first < length_; first += lanes)
      for (std::size_t column = 0; column < rows.dim; column += lanes) {
        transpose(sums + column * padded_ + first, padded_, part, lanes);
        for (std::size_t i = first; i < std::min(length_, first + lanes); i++)
          store_row(rows, i, column, load_wide(part + (i - first) * lanes));
      }
  }

  std::size_t padded_;  // The length in whole blocks.
};

void multiply_alone(const TileProducts& products) {
  const TileRegisters registers;
  multiply(products);
}

}  // namespace

extern const AttentionKernels tile_attention_kernels;
const AttentionKernels tile_attention_kernels = kernels_of<TileTask>(&multiply_alone);

}  // namespace sennit::kernels::SENNIT_ISA
