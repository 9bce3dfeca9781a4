// SPDX-License-Identifier: Apache-2.0
// One head of one sequence (docs/reference/attention.md). Each sum is a chain of fused multiply-adds over rising
// indices, so that neither the size of a tile nor that of a block of rows changes a bit. Compiled once for each
// instruction set.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "attention.hpp"
#include "rounding.hpp"
#include "wide.hpp"

namespace sennit::kernels::SENNIT_ISA {

namespace {

// Rows of a result kept in registers, 16 columns wide.
#if defined(__AVX512F__)
constexpr std::size_t tile_rows = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr std::size_t tile_rows = 6;
#else
constexpr std::size_t tile_rows = 2;
#endif

// Rows of scores that are held at a time. A multiple of `tile_rows`.
constexpr std::size_t block_rows = 48;

// [begin, end), empty if begin >= end.
struct Span {
  std::size_t begin, end;

  bool is_empty() const { return begin >= end; }
};

SENNIT_INLINE Span both(Span one, Span other) {
  return {std::max(one.begin, other.begin), std::min(one.end, other.end)};
}
SENNIT_INLINE std::size_t down(std::size_t n) { return n / lanes * lanes; }
SENNIT_INLINE std::size_t up(std::size_t n) { return down(n + lanes - 1); }

// result[r] += Σ_k left(r, k) · right[k], 16 columns of it. Strides are in floats.
template <std::size_t rows>
[[gnu::noinline]] void add_products(const float* left, std::size_t row_stride, std::size_t stride, const float* right,
                                    std::size_t depth, float* result, std::size_t result_stride) {
  Wide sums[rows];
#pragma GCC unroll 12
  for (std::size_t r = 0; r < rows; r++) sums[r] = load_wide(result + r * result_stride);
  for (std::size_t k = 0; k < depth; k++) {
    const Wide of_right = load_wide(right + k * lanes);
#pragma GCC unroll 12
    for (std::size_t r = 0; r < rows; r++) sums[r] = fused(wide(left[r * row_stride + k * stride]), of_right, sums[r]);
  }
#pragma GCC unroll 12
  for (std::size_t r = 0; r < rows; r++) store(result + r * result_stride, sums[r]);
}

template <std::size_t rows = tile_rows>
SENNIT_INLINE void add_products(std::size_t count, const float* left, std::size_t row_stride, std::size_t stride,
                                const float* right, std::size_t depth, float* result, std::size_t result_stride) {
  if (count == rows) return add_products<rows>(left, row_stride, stride, right, depth, result, result_stride);
  if constexpr (rows > 1) add_products<rows - 1>(count, left, row_stride, stride, right, depth, result, result_stride);
}

// The same for rows that sum over different spans of k.
void add_products_over(const Span* spans, std::size_t count, const float* left, std::size_t row_stride,
                       std::size_t stride, const float* right, float* result, std::size_t result_stride) {
  const auto alone = [&](std::size_t r, Span span) {
    if (!span.is_empty())
      add_products<1>(left + r * row_stride + span.begin * stride, row_stride, stride, right + span.begin * lanes,
                      span.end - span.begin, result + r * result_stride, result_stride);
  };
  Span common = spans[0];
  for (std::size_t r = 1; r < count; r++) common = both(common, spans[r]);
  if (common.is_empty()) {
    for (std::size_t r = 0; r < count; r++) alone(r, spans[r]);
    return;
  }
  for (std::size_t r = 0; r < count; r++) alone(r, {spans[r].begin, common.begin});
  add_products(count, left + common.begin * stride, row_stride, stride, right + common.begin * lanes,
               common.end - common.begin, result, result_stride);
  for (std::size_t r = 0; r < count; r++) alone(r, {common.end, spans[r].end});
}

SENNIT_INLINE Wide logistic(const Wide& x) { return wide(1.0f) / (wide(1.0f) + exponential(wide(0.0f) - x)); }

SENNIT_INLINE float sum_of_lanes(const Wide& x) { return lane_sum(floats_of(x)); }
SENNIT_INLINE float first_lane(const Wide& x) { return x.parts[0][0]; }

// A vector with `x` in the lane of column i, and +0 elsewhere.
SENNIT_INLINE Wide in_lane(float x, std::size_t i) {
  const auto lane = static_cast<std::uint32_t>(i % lanes);
  return only(wide(x), lanes_in(lane, lane + 1));
}

template <bool bf16>
SENNIT_INLINE float element_at(const void* from, std::size_t at) {
  if constexpr (bf16)
    return std::bit_cast<float>(std::uint32_t{static_cast<const std::uint16_t*>(from)[at]} << 16);
  else
    return static_cast<const float*>(from)[at];
}

template <bool bf16>
SENNIT_INLINE Wide load_columns(const void* from, std::size_t at, std::size_t count) {
  if (!bf16 && count >= lanes) return load_wide(static_cast<const float*>(from) + at);
  alignas(cache_line_bytes) float columns[lanes] = {};
  for (std::size_t lane = 0; lane < std::min(count, lanes); lane++) columns[lane] = element_at<bf16>(from, at + lane);
  return load_wide(columns);
}

template <bool bf16>
SENNIT_INLINE void store_columns(void* to, std::size_t at, const Wide& x, std::size_t count) {
  if constexpr (bf16)
    store_halves(static_cast<std::uint16_t*>(to) + at, to_bf16(floats_of(x)), count);
  else if (count >= lanes)
    store(static_cast<float*>(to) + at, x);
  else
    std::memcpy(static_cast<float*>(to) + at, &x, count * sizeof(float));
}

// Pieces of a worker's memory, which begin at whole lines of the cache. Each is kept for the next task, and grows.
class Pieces {
 public:
  explicit Pieces(AttentionScratch& scratch) : pieces_(scratch.pieces) {}

  float* take(std::size_t floats) {
    if (next_ == pieces_.size()) pieces_.emplace_back();
    std::vector<float>& piece = pieces_[next_++];
    if (piece.size() < floats + lanes) piece.resize(floats + lanes);
    const auto address = reinterpret_cast<std::uintptr_t>(piece.data());
    return piece.data() + (-address % cache_line_bytes) / sizeof(float);
  }

  float* take_zeros(std::size_t floats) {
    float* piece = take(floats);
    std::fill_n(piece, floats, 0.0f);
    return piece;
  }

 private:
  std::vector<std::vector<float>>& pieces_;
  std::size_t next_ = 0;
};

// A head of a sequence, with whom its positions attend to, and scores of a block of rows.
template <bool bf16>
class Task {
 public:
  Task(const Attention& attention, std::size_t sequence, std::size_t head)
      : attention_(attention),
        head_(head),
        first_row_(static_cast<std::size_t>(attention.offsets[sequence])),
        length_(static_cast<std::size_t>(attention.offsets[sequence + 1]) - first_row_),
        history_(length_ - (attention.targets == nullptr ? 0 : static_cast<std::size_t>(attention.targets[sequence]))),
        context_(std::min(attention.context, history_)),
        shift_(context_ == 0 ? 0 : context_ - 1),
        window_(
            static_cast<std::size_t>(std::min<std::uint64_t>(static_cast<std::uint64_t>(attention.window), length_))),
        depth_(attention.query.dim),
        width_(attention.value.dim),
        has_bias_(attention.bias_entries() > 0) {}

  void attend(const AttentionResult& result, AttentionScratch& scratch) {
    const std::size_t columns = most_columns();
    Pieces pieces(scratch);
    const float* queries = pack(attention_.query, pieces);
    const float* keys = columns_of(pack(attention_.key, pieces), depth_, pieces);
    const float* values = panels_of(pack(attention_.value, pieces), width_, pieces);
    float* weights = pieces.take(block_rows * columns);
    float* sums = pieces.take(block_rows * up(width_));
    bias_row_ = pieces.take(columns);
    for (std::size_t first = 0; first < length_; first += block_rows) {
      const Block block = block_at(first);
      std::array<float, block_rows> own{};
      fill_scores(block, queries, keys, weights, own.data());
      for (std::size_t i = first; i < block.rows.end; i++) {
        float* row = weights + (i - first) * block.width();
        if (attention_.is_softmax)
          make_softmax(block, i, row, own[i - first], statistics(result.statistics, i));
        else
          make_silu(block, i, row, own[i - first]);
      }
      std::fill_n(sums, block_rows * up(width_), 0.0f);
      sum_rows(block, weights, own.data(), values, width_, sums);
      store_rows(block, sums, result.output);
    }
  }

  void differentiate(const AttentionGradients& gradients, std::size_t sequence, AttentionScratch& scratch) {
    const std::size_t columns = most_columns();
    Pieces pieces(scratch);
    const float* queries = pack(attention_.query, pieces);
    const float* arriving = pack(gradients.output, pieces);
    const float* key_rows = pack(attention_.key, pieces);
    const float* keys = columns_of(key_rows, depth_, pieces);
    const float* values = columns_of(pack(attention_.value, pieces), width_, pieces);
    const float* query_panels = panels_of(queries, depth_, pieces);
    const float* key_panels = panels_of(key_rows, depth_, pieces);
    const float* arriving_panels = panels_of(arriving, width_, pieces);
    float* key_gradient = pieces.take_zeros(length_ * up(depth_));
    float* value_gradient = pieces.take_zeros(length_ * up(width_));
    float* weights = pieces.take(block_rows * columns);
    float* scores = pieces.take(block_rows * columns);
    float* sums = pieces.take(block_rows * up(depth_));
    bias_row_ = pieces.take(columns);
    float* bias_gradient = nullptr;
    if (gradients.bias != nullptr)
      bias_gradient = gradients.bias + (sequence * attention_.heads + head_) * attention_.bias_entries();
    for (std::size_t first = 0; first < length_; first += block_rows) {
      const Block block = block_at(first);
      std::array<float, block_rows> own_weight{}, own_score{};
      fill_scores(block, queries, keys, weights, own_weight.data());
      fill_products(block, arriving, width_, values, scores, own_score.data());
      for (std::size_t i = first; i < block.rows.end; i++) {
        float* weight = weights + (i - first) * block.width();
        float* score = scores + (i - first) * block.width();
        if (attention_.is_softmax)
          differentiate_softmax(block, i, weight, score, own_weight[i - first], own_score[i - first],
                                statistics(gradients.statistics, i));
        else
          differentiate_silu(block, i, weight, score, own_weight[i - first], own_score[i - first]);
        if (bias_gradient != nullptr) add_bias_gradient(block, i, score, own_score[i - first], bias_gradient);
        scale_row(block, i, score, own_score[i - first]);
      }
      std::fill_n(sums, block_rows * up(depth_), 0.0f);
      sum_rows(block, scores, own_score.data(), key_panels, depth_, sums);
      store_rows(block, sums, gradients.query);
      sum_columns(block, weights, own_weight.data(), arriving_panels, width_, value_gradient);
      sum_columns(block, scores, own_score.data(), query_panels, depth_, key_gradient);
    }
    store_panels(key_gradient, gradients.key);
    store_panels(value_gradient, gradients.value);
  }

 private:
  // Rows of scores, and the columns that any of them needs, in whole vectors.
  struct Block {
    Span rows, columns;

    std::size_t width() const { return columns.end - columns.begin; }
  };

  // Positions of the context share the first place, candidates the one behind the history. Distances are of places.
  std::size_t place_of(std::size_t i) const { return i < context_ ? 0 : std::min(i, history_) - shift_; }
  std::size_t first_at(std::size_t place) const { return place == 0 ? 0 : place + shift_; }
  std::size_t distance(std::size_t i, std::size_t j) const {
    const std::size_t from = place_of(i), to = place_of(j);
    return from > to ? from - to : to - from;
  }

  // Whom position i attends to, but for itself where it is a candidate.
  Span attended(std::size_t i) const {
    if (i < context_) return {0, history_};
    const std::size_t place = place_of(i), begin = first_at(place > window_ ? place - window_ : 0);
    if (i >= history_) return {begin, history_};
    return {begin, attention_.is_causal ? i + 1 : std::min(history_, i + window_ + 1)};
  }

  // Who attends to position j of the history, but for the context where it is apart from the others.
  Span attending(std::size_t j) const {
    const std::size_t place = place_of(j);
    std::size_t begin = first_at(place);
    if (!attention_.is_causal) begin = first_at(place > window_ ? place - window_ : 0);
    const bool by_targets = place_of(history_) - place <= window_;
    return {begin, by_targets ? length_ : std::min(history_, place + window_ + shift_ + 1)};
  }
  Span attending_context(std::size_t j) const { return {0, std::min(context_, attending(j).begin)}; }

  Block block_at(std::size_t first) const {
    const Span rows{first, std::min(length_, first + block_rows)};
    Span columns = attended(rows.begin);
    for (std::size_t i = rows.begin + 1; i < rows.end; i++) {
      const Span row = attended(i);
      columns = {std::min(columns.begin, row.begin), std::max(columns.end, row.end)};
    }
    return {rows, {down(columns.begin), std::max(up(columns.end), down(columns.begin))}};
  }

  std::size_t most_columns() const {
    std::size_t most = lanes;
    for (std::size_t first = 0; first < length_; first += block_rows) most = std::max(most, block_at(first).width());
    return most;
  }

  static constexpr std::size_t element_bytes = bf16 ? 2 : 4, rows_ahead = 8;

  std::size_t start_of(const HeadRows& rows, std::size_t i) const {
    return (first_row_ + i) * rows.row_stride + head_ * rows.head_stride;
  }
  Wide load_at(const HeadRows& rows, std::size_t i, std::size_t column) const {
    return load_columns<bf16>(rows.data, start_of(rows, i) + column, rows.dim - column);
  }
  void store_at(const HeadRows& rows, std::size_t i, std::size_t column, const Wide& x) const {
    store_columns<bf16>(rows.data, start_of(rows, i) + column, x, rows.dim - column);
  }
  float* statistics(const float* all_rows, std::size_t i) const {
    return const_cast<float*>(all_rows) + ((first_row_ + i) * attention_.heads + head_) * 2;
  }

  // [rows, dim], with the dim padded to whole vectors.
  const float* pack(const HeadRows& rows, Pieces& pieces) const {
    float* packed = pieces.take(length_ * up(rows.dim));
    const auto address = [&](std::size_t i) {
      return static_cast<const std::byte*>(rows.data) + start_of(rows, i) * element_bytes;
    };
    for (std::size_t i = 0; i < length_; i++) {
      // The processor does not guess a head's part of the next row: other heads' lie between.
      if (i + rows_ahead < length_)
        for (std::size_t at = 0; at < rows.dim * element_bytes; at += cache_line_bytes)
          __builtin_prefetch(address(i + rows_ahead) + at);
      for (std::size_t column = 0; column < rows.dim; column += lanes)
        store(packed + i * up(rows.dim) + column, load_at(rows, i, column));
    }
    return packed;
  }

  // 16 columns of all rows, then the next 16: [dim / 16, rows, 16].
  const float* panels_of(const float* rows, std::size_t dim, Pieces& pieces) const {
    float* panels = pieces.take(length_ * up(dim));
    for (std::size_t i = 0; i < length_; i++)
      for (std::size_t column = 0; column < dim; column += lanes)
        store(panels + column * length_ + i * lanes, load_wide(rows + i * up(dim) + column));
    return panels;
  }

  // All columns of 16 rows, then of the next 16: [rows / 16, dim, 16].
  const float* columns_of(const float* rows, std::size_t dim, Pieces& pieces) const {
    float* columns = pieces.take(up(length_) * dim);
    for (std::size_t first = 0; first < length_; first += lanes) {
      const std::size_t count = std::min(lanes, length_ - first);
      for (std::size_t column = 0; column < dim; column++) {
        float* to = columns + first * dim + column * lanes;
        for (std::size_t row = 0; row < count; row++) to[row] = rows[(first + row) * up(dim) + column];
        std::fill(to + count, to + lanes, 0.0f);
      }
    }
    return columns;
  }

  void store_rows(const Block& block, const float* sums, const HeadRows& rows) const {
    for (std::size_t i = block.rows.begin; i < block.rows.end; i++)
      for (std::size_t column = 0; column < rows.dim; column += lanes)
        store_at(rows, i, column, load_wide(sums + (i - block.rows.begin) * up(rows.dim) + column));
  }

  void store_panels(const float* panels, const HeadRows& rows) const {
    for (std::size_t i = 0; i < length_; i++)
      for (std::size_t column = 0; column < rows.dim; column += lanes)
        store_at(rows, i, column, load_wide(panels + column * length_ + i * lanes));
  }

  // left[i] · right[j] for all pairs of the block that attend, and of candidates with themselves.
  void fill_products(const Block& block, const float* left, std::size_t dim, const float* right, float* products,
                     float* own) const {
    for (std::size_t first = block.rows.begin; first < block.rows.end; first += tile_rows) {
      const std::size_t count = std::min(tile_rows, block.rows.end - first);
      Span needed = attended(first);
      for (std::size_t r = 1; r < count; r++) {
        const Span row = attended(first + r);
        needed = {std::min(needed.begin, row.begin), std::max(needed.end, row.end)};
      }
      float* rows = products + (first - block.rows.begin) * block.width() - block.columns.begin;
      for (std::size_t column = down(needed.begin); column < needed.end; column += lanes) {
        for (std::size_t r = 0; r < count; r++) store(rows + r * block.width() + column, wide(0.0f));
        add_products(count, left + first * up(dim), up(dim), 1, right + column * dim, dim, rows + column,
                     block.width());
      }
    }
    for (std::size_t i = std::max(history_, block.rows.begin); i < block.rows.end; i++) {
      alignas(cache_line_bytes) float sums[lanes] = {};
      add_products<1>(left + i * up(dim), up(dim), 1, right + down(i) * dim, dim, sums, lanes);
      own[i - block.rows.begin] = sums[i % lanes];
    }
  }

  // Scores: products with the scale, and with biases.
  void fill_scores(const Block& block, const float* queries, const float* keys, float* scores, float* own) {
    fill_products(block, queries, depth_, keys, scores, own);
    const Wide scale = wide(attention_.scale);
    for (std::size_t i = block.rows.begin; i < block.rows.end; i++) {
      float* row = scores + (i - block.rows.begin) * block.width() - block.columns.begin;
      float& of_itself = own[i - block.rows.begin];
      const Span span = attended(i);
      if (!has_bias_) {
        for (std::size_t j = down(span.begin); j < span.end; j += lanes) store(row + j, load_wide(row + j) * scale);
        of_itself *= attention_.scale;
        continue;
      }
      const float own_bias = fill_bias(block, i);
      const float* bias = bias_row_ - block.columns.begin;
      for (std::size_t j = down(span.begin); j < span.end; j += lanes)
        store(row + j, fused(load_wide(row + j), scale, load_wide(bias + j)));
      of_itself = first_lane(fused(wide(of_itself), scale, wide(own_bias)));
    }
  }

  // Calls job(bucket, span) for the spans of columns that share an entry of the time bias. Times of a history rise.
  template <typename Job>
  void for_each_time(std::size_t i, Span span, Job job) const {
    const std::int64_t* times = attention_.times + first_row_;
    const auto bucket_of = [&](std::size_t j) {
      const std::int64_t* end = attention_.boundaries + attention_.boundary_count;
      return static_cast<std::size_t>(std::upper_bound(attention_.boundaries, end, apart(times[i], times[j])) -
                                      attention_.boundaries);
    };
    while (!span.is_empty()) {
      const std::size_t bucket = bucket_of(span.begin);
      std::size_t end = span.begin + 1;
      while (end < span.end && bucket_of_is(times, i, end, bucket)) end++;
      job(bucket, Span{span.begin, end});
      span.begin = end;
    }
  }

  static std::int64_t apart(std::int64_t one, std::int64_t other) { return one > other ? one - other : other - one; }

  bool bucket_of_is(const std::int64_t* times, std::size_t i, std::size_t j, std::size_t bucket) const {
    const std::int64_t difference = apart(times[i], times[j]);
    return (bucket == 0 || difference >= attention_.boundaries[bucket - 1]) &&
           (bucket == attention_.boundary_count || difference < attention_.boundaries[bucket]);
  }

  // The biases of a row's columns into bias_row_; returns that of a position with itself.
  float fill_bias(const Block& block, std::size_t i) const {
    const Span span = attended(i);
    float* bias = bias_row_ - block.columns.begin;
    float own = 0.0f;
    for (std::size_t j = down(span.begin); j < up(span.end); j += lanes) store(bias + j, wide(0.0f));
    if (attention_.position_bias != nullptr) {
      const std::size_t last = attention_.positions - 1;
      const float* entries = attention_.position_bias + head_ * attention_.positions;
      for (std::size_t j = span.begin; j < span.end; j++) bias[j] += entries[std::min(distance(i, j), last)];
      own += entries[0];
    }
    if (attention_.time_bias != nullptr) {
      const float* entries = attention_.time_bias + head_ * (attention_.boundary_count + 1);
      for_each_time(i, span, [&](std::size_t bucket, Span columns) {
        for (std::size_t j = columns.begin; j < columns.end; j++) bias[j] += entries[bucket];
      });
      own += entries[0];
    }
    return own;
  }

  // Calls job(place, mask) for the vectors of a row; the mask has the lanes that are attended to.
  template <typename Job>
  SENNIT_INLINE_MEMBER void for_each_vector(Span span, Job job) const {
    if (span.is_empty()) return;
    const auto part_of = [&](std::size_t j) {
      return lanes_in(j < span.begin ? static_cast<std::uint32_t>(span.begin - j) : 0,
                      static_cast<std::uint32_t>(std::min(lanes, span.end - j)));
    };
    std::size_t j = down(span.begin);
    if (j < span.begin) job(j, part_of(j)), j += lanes;
    for (; j + lanes <= span.end; j += lanes) job(j, AllLanes{});
    if (j < span.end) job(j, part_of(j));
  }

  void make_softmax(const Block& block, std::size_t i, float* row, float& own, float* statistics) const {
    const Span span = attended(i);
    const bool is_target = i >= history_;
    row -= block.columns.begin;
    const Wide least = wide(-std::numeric_limits<float>::infinity());
    Wide greatest = is_target ? wide(own) : least;
    for_each_vector(span, [&](std::size_t j, const auto& mask) SENNIT_INLINE_LAMBDA {
      const Wide x = choose(mask, load_wide(row + j), least);
      greatest = greater(x, greatest);
    });
    const Floats by_lane = floats_of(greatest);
    float most = by_lane[0];
    for (std::size_t lane = 1; lane < lanes; lane++) most = by_lane[lane] > most ? by_lane[lane] : most;
    Wide sum = wide(0.0f);
    for_each_vector(span, [&](std::size_t j, const auto& mask) SENNIT_INLINE_LAMBDA {
      const Wide weight = only(exponential(load_wide(row + j) - wide(most)), mask);
      store(row + j, weight);
      sum = sum + weight;
    });
    if (is_target) {
      own = first_lane(exponential(wide(own - most)));
      sum = sum + in_lane(own, i);
    }
    const float share = 1.0f / sum_of_lanes(sum);
    for (std::size_t j = down(span.begin); j < span.end; j += lanes) store(row + j, load_wide(row + j) * wide(share));
    own *= share;
    statistics[0] = most;
    statistics[1] = share;
  }

  void make_silu(const Block& block, std::size_t i, float* row, float& own) const {
    const Span span = attended(i);
    row -= block.columns.begin;
    const auto weight = [share = wide(attention_.share)](const Wide& x)
                            SENNIT_INLINE_LAMBDA { return x * logistic(x) * share; };
    for (std::size_t j = down(span.begin); j < span.end; j += lanes) store(row + j, weight(load_wide(row + j)));
    if (i >= history_) own = first_lane(weight(wide(own)));
  }

  // Scores become weights; gradients of weights become those of scores.
  void differentiate_softmax(const Block& block, std::size_t i, float* weights, float* scores, float& own_weight,
                             float& own_score, const float* statistics) const {
    const Span span = attended(i);
    const bool is_target = i >= history_;
    weights -= block.columns.begin;
    scores -= block.columns.begin;
    const Wide most = wide(statistics[0]), share = wide(statistics[1]);
    Wide sum = wide(0.0f);
    for_each_vector(span, [&](std::size_t j, const auto& mask) SENNIT_INLINE_LAMBDA {
      const Wide weight = exponential(load_wide(weights + j) - most) * share;
      store(weights + j, weight);
      sum = sum + only(weight * load_wide(scores + j), mask);
    });
    if (is_target) {
      own_weight = first_lane(exponential(wide(own_weight) - most) * share);
      sum = sum + in_lane(own_weight * own_score, i);
    }
    const float mean = sum_of_lanes(sum);
    for (std::size_t j = down(span.begin); j < span.end; j += lanes)
      store(scores + j, load_wide(weights + j) * (load_wide(scores + j) - wide(mean)));
    own_score = own_weight * (own_score - mean);
  }

  void differentiate_silu(const Block& block, std::size_t i, float* weights, float* scores, float& own_weight,
                          float& own_score) const {
    const Span span = attended(i);
    weights -= block.columns.begin;
    scores -= block.columns.begin;
    const Wide share = wide(attention_.share), one = wide(1.0f);
    const auto change = [&](Wide& x, Wide& gradient) SENNIT_INLINE_LAMBDA {
      const Wide y = logistic(x), slope = y * fused(x, one - y, one);
      gradient = gradient * slope * share;
      x = x * y * share;
    };
    for (std::size_t j = down(span.begin); j < span.end; j += lanes) {
      Wide x = load_wide(weights + j), gradient = load_wide(scores + j);
      change(x, gradient);
      store(weights + j, x);
      store(scores + j, gradient);
    }
    if (i < history_) return;
    Wide x = wide(own_weight), gradient = wide(own_score);
    change(x, gradient);
    own_weight = first_lane(x);
    own_score = first_lane(gradient);
  }

  // The gradient of a score becomes that of the product of query and key.
  void scale_row(const Block& block, std::size_t i, float* scores, float& own) const {
    const Span span = attended(i);
    scores -= block.columns.begin;
    for (std::size_t j = down(span.begin); j < span.end; j += lanes)
      store(scores + j, load_wide(scores + j) * wide(attention_.scale));
    own *= attention_.scale;
  }

  void add_bias_gradient(const Block& block, std::size_t i, const float* scores, float own, float* gradient) const {
    const Span span = attended(i);
    const bool is_target = i >= history_;
    scores -= block.columns.begin;
    if (attention_.position_bias != nullptr) {
      const std::size_t last = attention_.positions - 1;
      for (std::size_t j = span.begin; j < span.end; j++) gradient[std::min(distance(i, j), last)] += scores[j];
      if (is_target) gradient[0] += own;
      gradient += attention_.positions;
    }
    if (attention_.time_bias != nullptr) {
      for_each_time(i, span, [&](std::size_t bucket, Span columns) {
        for (std::size_t j = columns.begin; j < columns.end; j++) gradient[bucket] += scores[j];
      });
      if (is_target) gradient[0] += own;
    }
  }

  // sums[i] += Σ_j weights[i, j] · rows[j].
  void sum_rows(const Block& block, const float* weights, const float* own, const float* rows, std::size_t dim,
                float* sums) const {
    for (std::size_t column = 0; column < dim; column += lanes) {
      const float* panel = rows + column * length_;
      for (std::size_t first = block.rows.begin; first < block.rows.end; first += tile_rows) {
        const std::size_t count = std::min(tile_rows, block.rows.end - first), at = first - block.rows.begin;
        std::array<Span, tile_rows> spans;
        for (std::size_t r = 0; r < count; r++) spans[r] = attended(first + r);
        add_products_over(spans.data(), count, weights + at * block.width() - block.columns.begin, block.width(), 1,
                          panel, sums + at * up(dim) + column, up(dim));
      }
      for (std::size_t i = std::max(history_, block.rows.begin); i < block.rows.end; i++) {
        const std::size_t at = i - block.rows.begin;
        add_products<1>(own + at, 0, 0, panel + i * lanes, 1, sums + at * up(dim) + column, up(dim));
      }
    }
  }

  // sums[j] += Σ_i weights[i, j] · rows[i], for the rows of the block.
  void sum_columns(const Block& block, const float* weights, const float* own, const float* rows, std::size_t dim,
                   float* sums) const {
    const std::size_t end = std::min(block.columns.end, history_);
    for (std::size_t column = 0; column < dim; column += lanes) {
      const float* panel = rows + column * length_;
      float* sums_of = sums + column * length_;
      for (std::size_t first = block.columns.begin; first < end; first += tile_rows) {
        const std::size_t count = std::min(tile_rows, end - first);
        std::array<Span, tile_rows> spans;
        const auto add = [&] {
          add_products_over(spans.data(), count,
                            weights + (first - block.columns.begin) - block.rows.begin * block.width(), 1,
                            block.width(), panel, sums_of + first * lanes, lanes);
        };
        if (block.rows.begin < context_) {
          for (std::size_t r = 0; r < count; r++) spans[r] = both(attending_context(first + r), block.rows);
          add();
        }
        for (std::size_t r = 0; r < count; r++) spans[r] = both(attending(first + r), block.rows);
        add();
      }
      for (std::size_t i = std::max(history_, block.rows.begin); i < block.rows.end; i++)
        add_products<1>(own + (i - block.rows.begin), 0, 0, panel + i * lanes, 1, sums_of + i * lanes, lanes);
    }
  }

  const Attention& attention_;
  std::size_t head_, first_row_, length_, history_, context_, shift_, window_, depth_, width_;
  bool has_bias_;
  float* bias_row_ = nullptr;
};

void attend(const Attention& attention, const AttentionResult& result, std::size_t sequence, std::size_t head,
            AttentionScratch& scratch) {
  if (attention.is_bf16)
    Task<true>(attention, sequence, head).attend(result, scratch);
  else
    Task<false>(attention, sequence, head).attend(result, scratch);
}

void differentiate(const Attention& attention, const AttentionGradients& gradients, std::size_t sequence,
                   std::size_t head, AttentionScratch& scratch) {
  if (attention.is_bf16)
    Task<true>(attention, sequence, head).differentiate(gradients, sequence, scratch);
  else
    Task<false>(attention, sequence, head).differentiate(gradients, sequence, scratch);
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels{&attend, &differentiate};

}  // namespace sennit::kernels::SENNIT_ISA
