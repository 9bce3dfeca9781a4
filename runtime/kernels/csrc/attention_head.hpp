// SPDX-License-Identifier: Apache-2.0
// A head of one sequence: who attends to whom, biases of scores, and how a row of scores becomes weights and gradients
// (docs/reference/attention.md). Products of matrices are elsewhere: attention_task.cpp has those of float32,
// attention_tiles.cpp those of bfloat16.
//
// Included once for each instruction set, in a separate namespace.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "attention.hpp"
#include "rounding.hpp"
#include "wide.hpp"

namespace sennit::kernels::SENNIT_ISA {

// [begin, end), empty if begin >= end.
struct Span {
  std::size_t begin, end;

  bool is_empty() const { return begin >= end; }
};

SENNIT_INLINE Span both(Span one, Span other) {
  return {std::max(one.begin, other.begin), std::min(one.end, other.end)};
}
SENNIT_INLINE std::size_t down(std::size_t n, std::size_t unit = lanes) { return n / unit * unit; }
SENNIT_INLINE std::size_t up(std::size_t n, std::size_t unit = lanes) { return down(n + unit - 1, unit); }

SENNIT_INLINE Wide logistic(const Wide& x) { return reciprocal(wide(1.0f) + exponential(wide(0.0f) - x)); }

SENNIT_INLINE float greatest_lane(const Wide& x) {
  Floats all = floats_of(x);
  for (std::size_t half = lanes / 2; half > 0; half /= 2)
    for (std::size_t lane = 0; lane < half; lane++)
      all[lane] = all[lane] > all[lane + half] ? all[lane] : all[lane + half];
  return all[0];
}

SENNIT_INLINE float sum_of_lanes(const Wide& x) { return lane_sum(floats_of(x)); }
SENNIT_INLINE float first_lane(const Wide& x) { return x.parts[0][0]; }

// A vector with `x` in the lane of column i, and +0 elsewhere.
SENNIT_INLINE Wide in_lane(float x, std::size_t i) {
  const auto lane = static_cast<std::uint32_t>(i % lanes);
  return only(wide(x), lanes_in(lane, lane + 1));
}

// Calls job(column, mask) for the vectors of a row; the mask has the lanes that belong to the span.
template <typename Job>
SENNIT_INLINE void for_each_vector(Span span, Job job) {
  if (span.is_empty()) return;
  for (std::size_t j = down(span.begin); j < span.end; j += lanes) {
    if (j >= span.begin && j + lanes <= span.end)
      job(j, AllLanes{});
    else
      job(j, lanes_in(j < span.begin ? static_cast<std::uint32_t>(span.begin - j) : 0,
                      static_cast<std::uint32_t>(std::min(lanes, span.end - j))));
  }
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
  std::uint16_t* take_halves(std::size_t halves) { return reinterpret_cast<std::uint16_t*>(take((halves + 1) / 2)); }

  float* take_zeros(std::size_t floats) {
    float* piece = take(floats);
    std::fill_n(piece, floats, 0.0f);
    return piece;
  }

 private:
  std::vector<std::vector<float>>& pieces_;
  std::size_t next_ = 0;
};

// Rows of scores at most that are held at a time.
constexpr std::size_t most_block_rows = 48;

// Rows of products of queries and keys, or what becomes of them. A candidate's with itself is apart.
struct ScoreBlock {
  Span rows;
  std::size_t first_column, stride;
  float* scores;
  float* of_itself;  // [rows].

  // Where column 0 of a row would be.
  float* row(std::size_t i) const { return scores + (i - rows.begin) * stride - first_column; }
  float& own(std::size_t i) const { return of_itself[i - rows.begin]; }
};

class AttentionHead {
 public:
  AttentionHead(const Attention& attention, std::size_t sequence, std::size_t head)
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

 protected:
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

  // The columns that any of these rows attends to, from and to multiples of `unit`.
  Span columns_of_rows(Span rows, std::size_t unit) const {
    Span columns = attended(rows.begin);
    for (std::size_t i = rows.begin + 1; i < rows.end; i++) {
      const Span row = attended(i);
      columns = {std::min(columns.begin, row.begin), std::max(columns.end, row.end)};
    }
    const std::size_t begin = down(columns.begin, unit);
    return {begin, std::max(up(columns.end, unit), begin)};
  }

  std::size_t most_columns(std::size_t block_rows, std::size_t unit) const {
    std::size_t most = unit;
    for (std::size_t first = 0; first < length_; first += block_rows) {
      const Span columns = columns_of_rows({first, std::min(length_, first + block_rows)}, unit);
      most = std::max(most, columns.end - columns.begin);
    }
    return most;
  }

  std::size_t start_of(const HeadRows& rows, std::size_t i) const {
    return (first_row_ + i) * rows.row_stride + head_ * rows.head_stride;
  }
  float* statistics(const float* all_rows, std::size_t i) const {
    return const_cast<float*>(all_rows) + ((first_row_ + i) * attention_.heads + head_) * 2;
  }

  // Memory for biases of a row of `columns`, and for all distances. `gradient`: that of the biases, if it is wanted.
  void take_bias(std::size_t columns, Pieces& pieces, float* gradient = nullptr) {
    bias_gradient_ = gradient;
    if (gradient != nullptr) of_scores_ = pieces.take(columns + 2 * lanes);
    if (!has_bias_) return;
    bias_row_ = pieces.take(columns + 2 * lanes);
    if (attention_.position_bias == nullptr) return;
    // The distance of places x is at x; below 0 that of a position before. Vectors may go beyond both ends.
    most_distance_ = place_of(length_ - 1);
    const std::size_t margin = shift_ + 2 * lanes, entries = 2 * (most_distance_ + margin) + 1;
    float* by_distance = pieces.take_zeros(entries) + most_distance_ + margin;
    const std::size_t last = attention_.positions - 1;
    const float* from = attention_.position_bias + head_ * attention_.positions;
    const auto most = static_cast<std::ptrdiff_t>(most_distance_);
    for (std::ptrdiff_t x = -most; x <= most; x++)
      by_distance[x] = 0.0f + from[std::min(static_cast<std::size_t>(x < 0 ? -x : x), last)];
    by_distance_ = by_distance;
    if (gradient != nullptr) gradient_by_distance_ = pieces.take_zeros(entries) + most_distance_ + margin;
  }

  // Where column 0 would be of the gradients of a row's scores. Null if nobody wants those of biases.
  float* of_scores(const ScoreBlock& block) const {
    return of_scores_ == nullptr ? nullptr : of_scores_ - block.first_column;
  }

  // Adds the gradients of a row's scores, which are at `scores` + column.
  void add_bias_gradient(std::size_t i, const float* scores, float own) const {
    if (bias_gradient_ == nullptr) return;
    float* gradient = bias_gradient_;
    const Span span = attended(i);
    const bool is_target = i >= history_;
    if (attention_.position_bias != nullptr) {
      // Kept at -distance, so that columns rise with it. Where entries are shared, columns come one after another.
      const std::size_t last = attention_.positions - 1, place = place_of(i);
      float* sums = gradient_by_distance_;
      std::size_t j = span.begin;
      const std::size_t alone = attention_.is_causal && i >= context_
                                    ? std::max(context_, first_at(place > last ? place - last : 0))
                                    : span.end;
      for (; j < std::min(alone, span.end); j++)
        sums[-static_cast<std::ptrdiff_t>(std::min(distance(i, j), last))] += scores[j];
      for (; j < span.end; j += lanes) {
        float* to = sums + static_cast<std::ptrdiff_t>(j - shift_) - static_cast<std::ptrdiff_t>(place);
        const WideMask mask = lanes_in(0, static_cast<std::uint32_t>(std::min(lanes, span.end - j)));
        store(to, load_wide(to) + only(load_wide(scores + j), mask));
      }
      if (is_target) sums[0] += own;
      gradient += attention_.positions;
    }
    if (attention_.time_bias != nullptr) {
      for_each_time(i, span, [&](std::size_t bucket, Span columns) {
        float sum = gradient[bucket];
        for (std::size_t j = columns.begin; j < columns.end; j++) sum += scores[j];
        gradient[bucket] = sum;
      });
      if (is_target) gradient[0] += own;
    }
  }

  float* gradient_of_bias(const AttentionGradients& gradients, std::size_t sequence) const {
    if (gradients.bias == nullptr) return nullptr;
    return gradients.bias + (sequence * attention_.heads + head_) * attention_.bias_entries();
  }

  // Once, after all rows.
  void store_bias_gradient() const {
    if (gradient_by_distance_ == nullptr) return;
    const std::size_t entries = std::min(attention_.positions, most_distance_ + 1);
    for (std::size_t x = 0; x < entries; x++)
      bias_gradient_[x] = gradient_by_distance_[-static_cast<std::ptrdiff_t>(x)];
  }

  // Products become scores, then weights. writer(i) gives for each row what takes them: write(column, weights, mask).
  // Rows are done side by side, so that none waits for the sum of the one before.
  template <typename Writer>
  SENNIT_INLINE_MEMBER void make_weights(const ScoreBlock& block, float* all_statistics, Writer writer) const {
    scale_scores(block);
    if (!attention_.is_softmax) return make_silu(block, writer);
    for (std::size_t i = block.rows.begin; i < block.rows.end; i++) {
      const Span span = attended(i);
      const float* row = block.row(i);
      const Wide least = wide(-std::numeric_limits<float>::infinity());
      Wide greatest = i >= history_ ? wide(block.own(i)) : least;
      for_each_vector(span, [&](std::size_t j, const auto& mask) SENNIT_INLINE_LAMBDA {
        greatest = greater(choose(mask, load_wide(row + j), least), greatest);
      });
      statistics(all_statistics, i)[0] = greatest_lane(greatest);
    }
    for (std::size_t i = block.rows.begin; i < block.rows.end; i++) {
      float *row = block.row(i), *of_row = statistics(all_statistics, i), &own = block.own(i);
      const Wide most = wide(of_row[0]);
      Wide sum = wide(0.0f);
      for_each_vector(attended(i), [&](std::size_t j, const auto& mask) SENNIT_INLINE_LAMBDA {
        const Wide weight = only(exponential(load_wide(row + j) - most), mask);
        store(row + j, weight);
        sum = sum + weight;
      });
      if (i >= history_) {
        own = first_lane(exponential(wide(own) - most));
        sum = sum + in_lane(own, i);
      }
      of_row[1] = 1.0f / sum_of_lanes(sum);
    }
    for (std::size_t i = block.rows.begin; i < block.rows.end; i++) {
      const float *row = block.row(i), share = statistics(all_statistics, i)[1];
      const auto write = writer(i);
      for_each_vector(attended(i), [&](std::size_t j, const auto& mask)
                                       SENNIT_INLINE_LAMBDA { write(j, load_wide(row + j) * wide(share), mask); });
      block.own(i) *= share;
    }
  }

  // Products of query and key become weights; gradients of weights, in `gradients`, become those of scores, then those
  // of the products: write(column, weights, of_products, mask). After a row, end(i): `block` and `gradients` then have
  // what a candidate's own weight and product get.
  template <typename Writer, typename End>
  SENNIT_INLINE_MEMBER void differentiate_weights(const ScoreBlock& block, const ScoreBlock& gradients,
                                                  const float* all_statistics, Writer writer, End end) const {
    scale_scores(block);
    if (!attention_.is_softmax) return differentiate_silu(block, gradients, writer, end);
    const Wide scale = wide(attention_.scale);
    float* scores = of_scores(gradients);
    std::array<float, most_block_rows> means;
    for (std::size_t i = block.rows.begin; i < block.rows.end; i++) {
      const float *of_row = statistics(all_statistics, i), *gradient = gradients.row(i);
      float *row = block.row(i), &own = block.own(i);
      const Wide most = wide(of_row[0]), share = wide(of_row[1]);
      Wide sum = wide(0.0f);
      for_each_vector(attended(i), [&](std::size_t j, const auto& mask) SENNIT_INLINE_LAMBDA {
        const Wide weight = exponential(load_wide(row + j) - most) * share;
        store(row + j, weight);
        sum = sum + only(weight * load_wide(gradient + j), mask);
      });
      if (i >= history_) {
        own = first_lane(exponential(wide(own) - most) * share);
        sum = sum + in_lane(own * gradients.own(i), i);
      }
      means[i - block.rows.begin] = sum_of_lanes(sum);
    }
    for (std::size_t i = block.rows.begin; i < block.rows.end; i++) {
      const float *row = block.row(i), *gradient = gradients.row(i), mean = means[i - block.rows.begin];
      const auto write = writer(i);
      for_each_vector(attended(i), [&](std::size_t j, const auto& mask) SENNIT_INLINE_LAMBDA {
        const Wide weight = load_wide(row + j), of_score = weight * (load_wide(gradient + j) - wide(mean));
        if (scores != nullptr) store(scores + j, of_score);
        write(j, weight, of_score * scale, mask);
      });
      const float own_of_score = block.own(i) * (gradients.own(i) - mean);
      gradients.own(i) = own_of_score * attention_.scale;
      add_bias_gradient(i, scores, own_of_score);
      end(i);
    }
  }

  const Attention& attention_;
  std::size_t head_, first_row_, length_, history_, context_, shift_, window_, depth_, width_;
  bool has_bias_;

 private:
  // The biases of a row's columns, to column - first.
  void fill_bias(std::size_t i, std::size_t first) const {
    const Span span = attended(i);
    float* bias = bias_row_ - first;
    if (by_distance_ == nullptr) {
      for (std::size_t j = down(span.begin); j < span.end; j += lanes) store(bias + j, wide(0.0f));
    } else {
      const float* of_row = by_distance_ - place_of(i);
      for (std::size_t j = down(span.begin); j < span.end; j += lanes)
        store(bias + j, load_wide(of_row + static_cast<std::ptrdiff_t>(j) - static_cast<std::ptrdiff_t>(shift_)));
      for (std::size_t j = span.begin; j < std::min(context_, span.end); j++) bias[j] = of_row[0];
    }
    if (attention_.time_bias == nullptr) return;
    const float* entries = attention_.time_bias + head_ * (attention_.boundary_count + 1);
    for_each_time(i, span, [&](std::size_t bucket, Span columns) {
      for (std::size_t j = columns.begin; j < columns.end; j++) bias[j] += entries[bucket];
    });
  }

  // That of a position with itself.
  float own_bias() const {
    float own = by_distance_ == nullptr ? 0.0f : by_distance_[0];
    if (attention_.time_bias != nullptr) own += attention_.time_bias[head_ * (attention_.boundary_count + 1)];
    return own;
  }

  // Products become scores.
  void scale_scores(const ScoreBlock& block) const {
    const Wide scale = wide(attention_.scale);
    for (std::size_t i = block.rows.begin; i < block.rows.end; i++) {
      const Span span = attended(i);
      float* row = block.row(i);
      if (has_bias_) {
        fill_bias(i, block.first_column);
        const float* bias = bias_row_ - block.first_column;
        for (std::size_t j = down(span.begin); j < span.end; j += lanes)
          store(row + j, fused(load_wide(row + j), scale, load_wide(bias + j)));
      } else {
        for (std::size_t j = down(span.begin); j < span.end; j += lanes) store(row + j, load_wide(row + j) * scale);
      }
      if (i < history_) continue;
      float& own = block.own(i);
      own = has_bias_ ? first_lane(fused(wide(own), scale, wide(own_bias()))) : own * attention_.scale;
    }
  }

  template <typename Writer>
  SENNIT_INLINE_MEMBER void make_silu(const ScoreBlock& block, Writer writer) const {
    const auto weight = [share = wide(attention_.share)](const Wide& x)
                            SENNIT_INLINE_LAMBDA { return x * logistic(x) * share; };
    for (std::size_t i = block.rows.begin; i < block.rows.end; i++) {
      const float* row = block.row(i);
      const auto write = writer(i);
      for_each_vector(attended(i), [&](std::size_t j, const auto& mask)
                                       SENNIT_INLINE_LAMBDA { write(j, weight(load_wide(row + j)), mask); });
      if (i >= history_) block.own(i) = first_lane(weight(wide(block.own(i))));
    }
  }

  template <typename Writer, typename End>
  SENNIT_INLINE_MEMBER void differentiate_silu(const ScoreBlock& block, const ScoreBlock& gradients, Writer writer,
                                               End end) const {
    const Wide share = wide(attention_.share), one = wide(1.0f), scale = wide(attention_.scale);
    const auto change = [&](Wide& x, Wide& gradient) SENNIT_INLINE_LAMBDA {
      const Wide y = logistic(x), slope = y * fused(x, one - y, one);
      gradient = gradient * slope * share;
      x = x * y * share;
    };
    float* scores = of_scores(gradients);
    for (std::size_t i = block.rows.begin; i < block.rows.end; i++) {
      const float *row = block.row(i), *of_row = gradients.row(i);
      const auto write = writer(i);
      for_each_vector(attended(i), [&](std::size_t j, const auto& mask) SENNIT_INLINE_LAMBDA {
        Wide x = load_wide(row + j), gradient = load_wide(of_row + j);
        change(x, gradient);
        if (scores != nullptr) store(scores + j, gradient);
        write(j, x, gradient * scale, mask);
      });
      float own_of_score = 0.0f;
      if (i >= history_) {
        Wide x = wide(block.own(i)), gradient = wide(gradients.own(i));
        change(x, gradient);
        block.own(i) = first_lane(x);
        own_of_score = first_lane(gradient);
        gradients.own(i) = own_of_score * attention_.scale;
      }
      add_bias_gradient(i, scores, own_of_score);
      end(i);
    }
  }

  static std::int64_t apart(std::int64_t one, std::int64_t other) { return one > other ? one - other : other - one; }

  // Calls job(bucket, span) for the spans of columns that share an entry of the time bias, in their order. Times of a
  // history rise, so that up to the row's own time differences fall, and rise behind it.
  template <typename Job>
  void for_each_time(std::size_t i, Span span, Job job) const {
    if (span.is_empty()) return;
    const std::int64_t *times = attention_.times + first_row_, *boundaries = attention_.boundaries;
    const std::int64_t now = times[i];
    const std::size_t middle =
        static_cast<std::size_t>(std::lower_bound(times + span.begin, times + span.end, now) - times);
    for (const Span part : {Span{span.begin, middle}, Span{middle, span.end}}) {
      std::size_t j = part.begin;
      while (j < part.end) {
        const std::size_t bucket = static_cast<std::size_t>(
            std::upper_bound(boundaries, boundaries + attention_.boundary_count, apart(now, times[j])) - boundaries);
        const auto is_in = [&](std::size_t column) {
          const std::int64_t difference = apart(now, times[column]);
          return (bucket == 0 || difference >= boundaries[bucket - 1]) &&
                 (bucket == attention_.boundary_count || difference < boundaries[bucket]);
        };
        // Steps double while they stay in the bucket, then halve.
        std::size_t last = j, step = 1;
        while (last + step < part.end && is_in(last + step)) last += step, step *= 2;
        for (; step > 0; step /= 2)
          if (last + step < part.end && is_in(last + step)) last += step;
        job(bucket, Span{j, last + 1});
        j = last + 1;
      }
    }
  }

  float* bias_row_ = nullptr;
  const float* by_distance_ = nullptr;
  float *bias_gradient_ = nullptr, *gradient_by_distance_ = nullptr, *of_scores_ = nullptr;
  std::size_t most_distance_ = 0;
};

// A task attends and differentiates for one head. It is derived from AttentionHead.
template <typename Task>
constexpr AttentionKernels kernels_of(void (*multiply)(const TileProducts&)) {
  return {
      [](const Attention& attention, const AttentionResult& result, std::size_t sequence, std::size_t head,
         AttentionScratch& scratch) { Task(attention, sequence, head).attend(result, scratch); },
      [](const Attention& attention, const AttentionGradients& gradients, std::size_t sequence, std::size_t head,
         AttentionScratch& scratch) { Task(attention, sequence, head).differentiate(gradients, sequence, scratch); },
      multiply};
}

}  // namespace sennit::kernels::SENNIT_ISA
