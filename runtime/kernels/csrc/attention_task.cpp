// SPDX-License-Identifier: Apache-2.0
// Attention of float32 for one head of one sequence (docs/reference/attention.md). Each sum is a chain of fused
// multiply-adds over rising indices, so that neither the size of a tile nor that of a block of rows changes a bit.
// Compiled once for each instruction set.
#include <array>
#include <type_traits>

#include "attention_head.hpp"

namespace sennit::kernels::SENNIT_ISA {

namespace {

// Rows of a result kept in registers, and vectors of 16 columns.
#if defined(__AVX512F__)
constexpr std::size_t tile_rows = 12, tile_vectors = 2;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr std::size_t tile_rows = 6, tile_vectors = 1;
#else
constexpr std::size_t tile_rows = 2, tile_vectors = 1;
#endif

// Rows of scores that are held at a time.
constexpr std::size_t block_rows = most_block_rows;
static_assert(block_rows % tile_rows == 0);

// Σ_k left(r, k) · right(k, v), a vector of 16 columns, for result(r, v). Strides are in floats.
struct Products {
  const float* left;
  std::size_t row_stride, stride;  // Of r and k.
  const float* right;
  std::size_t right_vector_stride;  // That of k is 16.
  float* result;
  std::size_t result_stride, result_vector_stride;

  Products from(std::size_t row, std::size_t k) const {
    Products rest = *this;
    rest.left += row * row_stride + k * stride;
    rest.right += k * lanes;
    rest.result += row * result_stride;
    return rest;
  }
};

// Which k a row of a tile sums over: from a k of its own in the first ones, and to a k of its own, one more in each
// row.
enum class Ends : std::uint8_t { even, rising };

// What sums begin with: +0, or what is in the result.
enum class Adds : std::uint8_t { nothing, result };

// `depth` is that of all rows. Rows before the last one also have the k before, and rows behind the first one those
// behind, where begins or ends rise.
template <std::size_t rows, std::size_t vectors, Ends begins, Ends ends, Adds adds = Adds::result>
[[gnu::noinline]] void add_products(const Products& products, std::size_t depth) {
  const Products p = products;
  Wide sums[rows][vectors];
#pragma GCC unroll 12
  for (std::size_t r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (std::size_t v = 0; v < vectors; v++)
      sums[r][v] =
          adds == Adds::nothing ? wide(0.0f) : load_wide(p.result + r * p.result_stride + v * p.result_vector_stride);
  const auto add = [&](const float* left, const float* right, std::size_t first, std::size_t end) SENNIT_INLINE_LAMBDA {
    Wide of_right[vectors];
#pragma GCC unroll 2
    for (std::size_t v = 0; v < vectors; v++) of_right[v] = load_wide(right + v * p.right_vector_stride);
#pragma GCC unroll 12
    for (std::size_t r = first; r < end; r++) {
      const Wide of_left = wide(left[r * p.row_stride]);
#pragma GCC unroll 2
      for (std::size_t v = 0; v < vectors; v++) sums[r][v] = fused(of_left, of_right[v], sums[r][v]);
    }
  };
  const float *left = p.left, *right = p.right;
  if constexpr (begins == Ends::rising) {
    left -= (rows - 1) * p.stride, right -= (rows - 1) * lanes;
#pragma GCC unroll 12
    for (std::size_t t = 0; t + 1 < rows; t++, left += p.stride, right += lanes) add(left, right, 0, t + 1);
  }
  for (std::size_t k = 0; k < depth; k++, left += p.stride, right += lanes) add(left, right, 0, rows);
  if constexpr (ends == Ends::rising) {
#pragma GCC unroll 12
    for (std::size_t t = 0; t + 1 < rows; t++, left += p.stride, right += lanes) add(left, right, t + 1, rows);
  }
#pragma GCC unroll 12
  for (std::size_t r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (std::size_t v = 0; v < vectors; v++)
      store(p.result + r * p.result_stride + v * p.result_vector_stride, sums[r][v]);
}

template <std::size_t vectors, Adds adds = Adds::result, std::size_t rows = tile_rows>
SENNIT_INLINE void add_products(std::size_t count, const Products& products, std::size_t depth) {
  if (count == rows) return add_products<rows, vectors, Ends::even, Ends::even, adds>(products, depth);
  if constexpr (rows > 1) add_products<vectors, adds, rows - 1>(count, products, depth);
}

// For rows that sum over different spans of k.
template <std::size_t vectors>
void add_products_over(const Span* spans, std::size_t count, const Products& products) {
  const auto alone = [&](std::size_t r, Span span) {
    if (!span.is_empty())
      add_products<1, vectors, Ends::even, Ends::even>(products.from(r, span.begin), span.end - span.begin);
  };
  Span common = spans[0];
  bool begins_rise = count == tile_rows, ends_rise = begins_rise;
  for (std::size_t r = 1; r < count; r++) {
    common = both(common, spans[r]);
    begins_rise = begins_rise && spans[r].begin == spans[r - 1].begin + 1;
    ends_rise = ends_rise && spans[r].end == spans[r - 1].end + 1;
  }
  if (common.is_empty()) {
    for (std::size_t r = 0; r < count; r++) alone(r, spans[r]);
    return;
  }
  const Products shared = products.from(0, common.begin);
  const std::size_t depth = common.end - common.begin;
  if (!begins_rise)
    for (std::size_t r = 0; r < count; r++) alone(r, {spans[r].begin, common.begin});
  if (begins_rise && ends_rise)
    add_products<tile_rows, vectors, Ends::rising, Ends::rising>(shared, depth);
  else if (begins_rise)
    add_products<tile_rows, vectors, Ends::rising, Ends::even>(shared, depth);
  else if (ends_rise)
    add_products<tile_rows, vectors, Ends::even, Ends::rising>(shared, depth);
  else
    add_products<vectors>(count, shared, depth);
  if (!ends_rise)
    for (std::size_t r = 0; r < count; r++) alone(r, {common.end, spans[r].end});
}

// Calls job(vectors, column) for tiles of columns, the number of vectors as a constant.
template <typename Job>
SENNIT_INLINE void for_each_tile(Span columns, Job job) {
  std::size_t column = columns.begin;
  for (; column + (tile_vectors - 1) * lanes < columns.end; column += tile_vectors * lanes)
    job(std::integral_constant<std::size_t, tile_vectors>{}, column);
  if constexpr (tile_vectors > 1)
    for (; column < columns.end; column += lanes) job(std::integral_constant<std::size_t, 1>{}, column);
}

// Whom positions attend to, and scores of a block of rows.
class Task : AttentionHead {
 public:
  using AttentionHead::AttentionHead;

  void attend(const AttentionResult& result, AttentionScratch& scratch) {
    const std::size_t columns = most_columns(block_rows, lanes);
    Pieces pieces(scratch);
    const float* keys = columns_of(attention_.key, pieces);
    const float* values = panels_of(attention_.value, pieces);
    float* weights = pieces.take(block_rows * columns);
    float* sums = pieces.take(block_rows * up(width_));
    take_bias(columns, pieces);
    for (std::size_t first = 0; first < length_; first += block_rows) {
      const Block block = block_at(first);
      std::array<float, block_rows> own{};
      fill_products(block, attention_.query, keys, weights, own.data(), result.output);
      const ScoreBlock scores = scores_of(block, weights, own.data());
      make_weights(scores, result.statistics, [&](std::size_t i) SENNIT_INLINE_LAMBDA {
        return [row = scores.row(i)](std::size_t j, const Wide& weight, const auto&)
                   SENNIT_INLINE_LAMBDA { store(row + j, weight); };
      });
      std::fill_n(sums, block_rows * up(width_), 0.0f);
      sum_rows(block, weights, own.data(), values, width_, sums);
      store_rows(block, sums, result.output);
    }
  }

  void differentiate(const AttentionGradients& gradients, std::size_t sequence, AttentionScratch& scratch) {
    const std::size_t columns = most_columns(block_rows, lanes);
    Pieces pieces(scratch);
    const float* keys = columns_of(attention_.key, pieces);
    const float* values = columns_of(attention_.value, pieces);
    const float* query_panels = panels_of(attention_.query, pieces);
    const float* key_panels = panels_of(attention_.key, pieces);
    const float* arriving_panels = panels_of(gradients.output, pieces);
    float* key_gradient = pieces.take_zeros(length_ * up(depth_));
    float* value_gradient = pieces.take_zeros(length_ * up(width_));
    float* weights = pieces.take(block_rows * columns);
    float* scores = pieces.take(block_rows * columns + lanes);
    float* sums = pieces.take(block_rows * up(depth_));
    take_bias(columns, pieces, gradient_of_bias(gradients, sequence));
    for (std::size_t first = 0; first < length_; first += block_rows) {
      const Block block = block_at(first);
      std::array<float, block_rows> own_weight{}, own_score{};
      fill_products(block, attention_.query, keys, weights, own_weight.data(), gradients.query);
      fill_products(block, gradients.output, values, scores, own_score.data(), gradients.key, gradients.value);
      const ScoreBlock of_weights = scores_of(block, weights, own_weight.data());
      const ScoreBlock of_products = scores_of(block, scores, own_score.data());
      differentiate_weights(
          of_weights, of_products, gradients.statistics,
          [&](std::size_t i) SENNIT_INLINE_LAMBDA {
            return [weight = of_weights.row(i), score = of_products.row(i)](
                       std::size_t j, const Wide& x, const Wide& of_product, const auto&) SENNIT_INLINE_LAMBDA {
              store(weight + j, x);
              store(score + j, of_product);
            };
          },
          [](std::size_t) {});
      std::fill_n(sums, block_rows * up(depth_), 0.0f);
      sum_rows(block, scores, own_score.data(), key_panels, depth_, sums);
      store_rows(block, sums, gradients.query);
      sum_columns(block, weights, own_weight.data(), arriving_panels, width_, value_gradient);
      sum_columns(block, scores, own_score.data(), query_panels, depth_, key_gradient);
    }
    store_panels(key_gradient, gradients.key);
    store_panels(value_gradient, gradients.value);
    store_bias_gradient();
  }

 private:
  // Rows of scores, and the columns that any of them needs, in whole vectors.
  struct Block {
    Span rows, columns;

    std::size_t width() const { return columns.end - columns.begin; }
  };

  Block block_at(std::size_t first) const {
    const Span rows{first, std::min(length_, first + block_rows)};
    return {rows, columns_of_rows(rows, lanes)};
  }
  static ScoreBlock scores_of(const Block& block, float* scores, float* own) {
    return {block.rows, block.columns.begin, block.width(), scores, own};
  }
  // Where column 0 of a row would be.
  template <typename Float>
  static Float* row_of(const Block& block, Float* scores, std::size_t i) {
    return scores + (i - block.rows.begin) * block.width() - block.columns.begin;
  }

  static constexpr std::size_t rows_ahead = 16;

  const float* address(const HeadRows& rows, std::size_t i) const {
    return static_cast<const float*>(rows.data) + start_of(rows, i);
  }
  // The processor does not guess a head's part of a row behind: other heads' lie between.
  void fetch(const HeadRows& rows, std::size_t i) const {
    if (i < length_)
      for (std::size_t column = 0; column < rows.dim; column += lanes) __builtin_prefetch(address(rows, i) + column);
  }

  // 16 columns of all rows, then the next 16, the last ones with zeros behind: [dim / 16, rows, 16].
  const float* panels_of(const HeadRows& rows, Pieces& pieces) const {
    float* panels = pieces.take(length_ * up(rows.dim));
    for (std::size_t i = 0; i < length_; i++) {
      fetch(rows, i + rows_ahead);
      const float* from = address(rows, i);
      float* to = panels + i * lanes;
      std::size_t column = 0;
      for (; column + lanes <= rows.dim; column += lanes) store(to + column * length_, load_wide(from + column));
      if (column < rows.dim) store(to + column * length_, wide_of(load(from + column, rows.dim - column)));
    }
    return panels;
  }

  // All columns of 16 rows, then of the next 16, with zeros behind the last row: [rows / 16, dim, 16].
  const float* columns_of(const HeadRows& rows, Pieces& pieces) const {
    const std::size_t dim = rows.dim;
    float* columns = pieces.take(up(length_) * dim);
    for (std::size_t first = 0; first < length_; first += lanes) {
      const std::size_t count = std::min(lanes, length_ - first), next = std::min(first + 2 * lanes, length_);
      std::size_t column = 0;
      for (; count == lanes && column + lanes <= dim; column += lanes) {
        for (std::size_t row = first + lanes; row < next; row++) __builtin_prefetch(address(rows, row) + column);
        transpose(address(rows, first) + column, rows.row_stride, columns + first * dim + column * lanes, lanes);
      }
      for (; column < dim; column++) {
        float* to = columns + first * dim + column * lanes;
        for (std::size_t row = 0; row < count; row++) to[row] = address(rows, first + row)[column];
        std::fill(to + count, to + lanes, 0.0f);
      }
    }
    return columns;
  }

  // A row of a result, from vectors that are `stride` floats apart.
  void store_row(const HeadRows& rows, std::size_t i, const float* from, std::size_t stride) const {
    float* to = const_cast<float*>(address(rows, i));
    const std::size_t dim = rows.dim;
    std::size_t column = 0;
    for (; column + lanes <= dim; column += lanes, from += stride) store(to + column, load_wide(from));
    if (column < dim) std::memcpy(to + column, from, (dim - column) * sizeof(float));
  }
  void store_rows(const Block& block, const float* sums, const HeadRows& rows) const {
    for (std::size_t i = block.rows.begin; i < block.rows.end; i++)
      store_row(rows, i, sums + (i - block.rows.begin) * up(rows.dim), lanes);
  }
  void store_panels(const float* panels, const HeadRows& rows) const {
    for (std::size_t i = 0; i < length_; i++) store_row(rows, i, panels + i * lanes, length_ * lanes);
  }

  // left[i] · right[j] for all pairs of the block that attend, and of candidates with themselves. Beside them the rows
  // of results are fetched that the block will be stored to.
  template <typename... Results>
  void fill_products(const Block& block, const HeadRows& left, const float* right, float* products, float* own,
                     const Results&... results) const {
    const std::size_t dim = left.dim;
    for (std::size_t first = block.rows.begin; first < block.rows.end; first += tile_rows) {
      const std::size_t count = std::min(tile_rows, block.rows.end - first);
      float* rows = row_of(block, products, first);
      for (std::size_t row = first; row < first + tile_rows; row++) {
        fetch(left, row + tile_rows);
        (fetch(results, row), ...);
      }
      for_each_tile(columns_of_rows({first, first + count}, lanes), [&](auto vectors, std::size_t column) {
        add_products<vectors, Adds::nothing>(count,
                                             {address(left, first), left.row_stride, 1, right + column * dim,
                                              lanes * dim, rows + column, block.width(), lanes},
                                             dim);
      });
    }
    for (std::size_t i = std::max(history_, block.rows.begin); i < block.rows.end; i++) {
      alignas(cache_line_bytes) float sums[lanes];
      add_products<1, Adds::nothing>(1, {address(left, i), 0, 1, right + down(i) * dim, 0, sums, 0, 0}, dim);
      own[i - block.rows.begin] = sums[i % lanes];
    }
  }

  // sums[i] += Σ_j weights[i, j] · rows[j].
  void sum_rows(const Block& block, const float* weights, const float* own, const float* rows, std::size_t dim,
                float* sums) const {
    for_each_tile({0, up(dim)}, [&](auto vectors, std::size_t column) {
      const float* panel = rows + column * length_;
      for (std::size_t first = block.rows.begin; first < block.rows.end; first += tile_rows) {
        const std::size_t count = std::min(tile_rows, block.rows.end - first);
        std::array<Span, tile_rows> spans;
        for (std::size_t r = 0; r < count; r++) spans[r] = attended(first + r);
        add_products_over<vectors>(spans.data(), count,
                                   {row_of(block, weights, first), block.width(), 1, panel, length_ * lanes,
                                    sums + (first - block.rows.begin) * up(dim) + column, up(dim), lanes});
      }
      for (std::size_t i = std::max(history_, block.rows.begin); i < block.rows.end; i++) {
        const std::size_t at = i - block.rows.begin;
        add_products<vectors>(
            1, {own + at, 0, 0, panel + i * lanes, length_ * lanes, sums + at * up(dim) + column, 0, lanes}, 1);
      }
    });
  }

  // sums[j] += Σ_i weights[i, j] · rows[i], for the rows of the block.
  void sum_columns(const Block& block, const float* weights, const float* own, const float* rows, std::size_t dim,
                   float* sums) const {
    const std::size_t end = std::min(block.columns.end, history_), vector_stride = length_ * lanes;
    // The diagonal goes from corner to corner of tiles.
    const std::size_t before = (block.rows.begin - block.columns.begin) % tile_rows;
    for_each_tile({0, up(dim)}, [&](auto vectors, std::size_t column) {
      const float* panel = rows + column * length_;
      float* sums_of = sums + column * length_;
      for (std::size_t first = block.columns.begin, next; first < end; first = next) {
        next = std::min(end, first + (first == block.columns.begin && before > 0 ? before : tile_rows));
        const std::size_t count = next - first;
        std::array<Span, tile_rows> spans;
        const auto add = [&] {
          add_products_over<vectors>(
              spans.data(), count,
              {weights + (first - block.columns.begin) - block.rows.begin * block.width(), 1, block.width(), panel,
               vector_stride, sums_of + first * lanes, lanes, vector_stride});
        };
        if (block.rows.begin < context_) {
          for (std::size_t r = 0; r < count; r++) spans[r] = both(attending_context(first + r), block.rows);
          add();
        }
        for (std::size_t r = 0; r < count; r++) spans[r] = both(attending(first + r), block.rows);
        add();
      }
      for (std::size_t i = std::max(history_, block.rows.begin); i < block.rows.end; i++)
        add_products<vectors>(1,
                              {own + (i - block.rows.begin), 0, 0, panel + i * lanes, vector_stride,
                               sums_of + i * lanes, lanes, vector_stride},
                              1);
    });
  }
};

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = kernels_of<Task>(nullptr);

}  // namespace sennit::kernels::SENNIT_ISA
