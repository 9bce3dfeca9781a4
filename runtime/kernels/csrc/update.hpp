// SPDX-License-Identifier: Apache-2.0
// Sums the gradients of each row and applies the optimizer to it, in place (rules 3, 4 and 7 of
// docs/reference/embedding.md).
#pragma once

#include "rounding.hpp"

namespace sennit::kernels::SENNIT_ISA {

// Rows and gradients are prefetched this many lookups ahead. In row order both are scattered, and processors can
// predict neither: without prefetched gradients, sequences took 1.7 times as long, and bags 1.3 times.
constexpr std::size_t update_ahead = 16;

SENNIT_INLINE const float* gradient_of(const Gradients& gradients, std::size_t vector) {
  const std::uint32_t block = gradients.block_of == nullptr ? 0 : gradients.block_of[vector];
  return gradients.gradient + (static_cast<std::int64_t>(vector * gradients.dim) + gradients.shifts[block]);
}

SENNIT_INLINE float factor_of(const Gradients& gradients, std::uint32_t key, std::size_t vector) {
  if (gradients.weights != nullptr) return gradients.weights[key];
  return 1.0f / static_cast<float>(gradients.lengths[vector]);
}

// A part of a run, and the end of the entries that may be prefetched.
struct Part {
  const Entry* entries;
  std::size_t count;
  const Entry* all_end;
};

// Sums one chunk: `vectors` vectors from `column`, with `last` columns in the last one.
template <std::size_t vectors, bool has_factors>
SENNIT_INLINE void fold_tile(const Gradients& gradients, const Part& chunk, std::size_t column, std::size_t last,
                             Floats (&sums)[vectors]) {
  for (Floats& sum : sums) sum = Floats{};
  const Entry* const end = chunk.entries + chunk.count;
  for (const Entry* entry = chunk.entries; entry < end; entry++) {
    if (chunk.all_end - entry > static_cast<std::ptrdiff_t>(update_ahead)) {
      const float* next = gradient_of(gradients, gradients.vector_of(entry[update_ahead].key())) + column;
      for (std::size_t v = 0; v < vectors; v++) __builtin_prefetch(next + v * lanes);
    }
    const std::size_t vector = gradients.vector_of(entry->key());
    const float* g = gradient_of(gradients, vector) + column;
    const float factor = has_factors ? factor_of(gradients, entry->key(), vector) : 1.0f;
    for (std::size_t v = 0; v < vectors; v++) {
      const Floats x = load(g + v * lanes, v + 1 < vectors ? lanes : last);
      sums[v] = has_factors ? sums[v] + factor * x : sums[v] + x;
    }
  }
}

inline bool has_factors(const Gradients& gradients) {
  return gradients.weights != nullptr || gradients.lengths.data != nullptr;
}

// Sums a chunk of rows of exactly `vectors` vectors.
template <std::size_t vectors>
SENNIT_INLINE void fold_row(const Gradients& gradients, const Part& chunk, Floats (&sums)[vectors]) {
  if (has_factors(gradients))
    fold_tile<vectors, true>(gradients, chunk, 0, lanes, sums);
  else
    fold_tile<vectors, false>(gradients, chunk, 0, lanes, sums);
}

template <bool has_factors>
void fold_columns(const Gradients& gradients, const Part& chunk, float* sum) {
  std::size_t column = 0;
  for (; column + 4 * lanes <= gradients.dim; column += 4 * lanes) {
    Floats sums[4];
    fold_tile<4, has_factors>(gradients, chunk, column, lanes, sums);
    for (std::size_t v = 0; v < 4; v++) store(sum + column + v * lanes, sums[v]);
  }
  for (; column < gradients.dim; column += lanes) {
    const std::size_t rest = gradients.dim - column;
    Floats sums[1];
    fold_tile<1, has_factors>(gradients, chunk, column, rest < lanes ? rest : lanes, sums);
    store(sum + column, sums[0]);
  }
}

inline void fold(const Gradients& gradients, const Part& chunk, float* sum) {
  return has_factors(gradients) ? fold_columns<true>(gradients, chunk, sum)
                                : fold_columns<false>(gradients, chunk, sum);
}

// The entries at the start of a run, up to a chunk, that are in its first slice.
SENNIT_INLINE std::size_t chunk_of(const Gradients& gradients, const Entry* entries, std::size_t rest) {
  const std::size_t most = rest < chunk_lookups ? rest : chunk_lookups;
  const std::uint64_t slice = gradients.slice_of(entries[0]);
  if (gradients.slice_of(entries[most - 1]) == slice) return most;
  std::size_t size = 1;
  while (gradients.slice_of(entries[size]) == slice) size++;
  return size;
}

// Whether a run's sum is that of a single slice. Two lookups have the same sum in one slice and in two.
SENNIT_INLINE bool is_one_slice(const Gradients& gradients, const Entry* entries, std::size_t count) {
  return gradients.slices == nullptr || count <= 2 ||
         gradients.slice_of(entries[0]) == gradients.slice_of(entries[count - 1]);
}

// Sums a run: the sums of its chunks are leaves of a tree. Returns its position in `sums`. `fixed` as in Row.
template <std::size_t fixed>
float* sum_run(const RowUpdate& update, const Entry* entries, std::size_t count) {
  const std::size_t dim = fixed != 0 ? fixed * lanes : update.table->dim, stride = sum_stride(dim);
  const Entry* const all_end = update.entries + update.count;
  const bool is_sliced = !is_one_slice(update.gradients, entries, count);
  TreeStack stack;
  float* next = update.sums;
  const auto add_top = [&] {
    next -= stride;
    float* const left = next - stride;
    for (std::size_t at = 0; at < dim; at += lanes) store(left + at, load(left + at) + load(next + at));
  };
  std::uint64_t slice = 0, chunk = 0;
  for (std::size_t first = 0, size; first < count; first += size, chunk++) {
    const std::size_t rest = count - first;
    size = rest < chunk_lookups ? rest : chunk_lookups;
    if (is_sliced) {
      size = chunk_of(update.gradients, entries + first, rest);
      if (const std::uint64_t own = update.gradients.slice_of(entries[first]); own != slice) slice = own, chunk = 0;
    }
    for (std::size_t n = stack.push(TreeStack::leaf(slice, chunk)); n != 0; n--) add_top();
    const Part part{entries + first, size, all_end};
    if constexpr (fixed != 0) {
      Floats sum[fixed];
      fold_row(update.gradients, part, sum);
      for (std::size_t v = 0; v < fixed; v++) store(next + v * lanes, sum[v]);
    } else {
      fold(update.gradients, part, next);
    }
    next += stride;
  }
  for (std::size_t n = stack.depth(); n > 1; n--) add_top();
  return update.sums;
}

template <Precision precision, std::size_t fixed>
SENNIT_INLINE std::size_t row_bytes(const Table& table) {
  constexpr std::size_t bytes = precision == Precision::fp32 ? 4 : 2;
  return bytes * (fixed != 0 ? fixed * lanes : table.dim);
}

// The place of one row in its table, and the columns of its vectors. `fixed` is a number of full vectors known at
// compile time, so that a row stays in registers; 0: any number.
template <Optimizer optimizer, Precision precision, std::size_t fixed>
struct Row {
  const Table& table;
  const Step& step;
  std::uint32_t number;
  std::byte* weight;
  std::size_t dim, vectors;

  SENNIT_INLINE_MEMBER Row(const RowUpdate& update, std::uint32_t row)
      : table(*update.table),
        step(*update.step),
        number(row),
        weight(table.weight + row * row_bytes<precision, fixed>(table)),
        dim(fixed != 0 ? fixed * lanes : table.dim),
        vectors(fixed != 0 ? fixed : (dim + lanes - 1) / lanes) {}

  SENNIT_INLINE_MEMBER std::size_t columns(std::size_t v) const {
    return fixed != 0 || dim - v * lanes > lanes ? lanes : dim - v * lanes;
  }
  SENNIT_INLINE_MEMBER Floats w(std::size_t v) const {
    return load_row<precision>(element<precision>(weight, v * lanes), columns(v));
  }
  SENNIT_INLINE_MEMBER float* state(std::size_t which, std::size_t v) const {
    return table.states[which] + number * dim + v * lanes;
  }

  // Sums a function of the vector over the columns.
  template <typename Function>
  SENNIT_INLINE_MEMBER float sum(Function function) const {
    Floats parts[fixed != 0 ? fixed : max_dim / lanes];
    const std::size_t count = fixed != 0 ? fixed : padded(dim) / lanes;
    for (std::size_t v = 0; v < vectors; v++) parts[v] = function(v);
    for (std::size_t v = vectors; v < count; v++) parts[v] = Floats{};
    return tree_sum(parts, count);
  }

  // Stores a function of weight and vector for each vector.
  template <typename Function>
  SENNIT_INLINE_MEMBER void change(Function function) const {
    Words words[4] = {};
    for (std::size_t v = 0; v < vectors; v++) {
      if constexpr (precision != Precision::fp32)
        if (step.is_stochastic && v % 4 == 0) random_words(table, step, number, v / 4, words);
      Floats x = w(v);
      if (step.keep != 1) x = x * step.keep;
      store_row<precision>(const_cast<std::byte*>(element<precision>(weight, v * lanes)), function(x, v), columns(v),
                           step.is_stochastic, words[v % 4]);
    }
  }

  SENNIT_INLINE_MEMBER void prepare(Floats* g) const {
    constexpr float infinity = __builtin_inff();
    const bool decays = step.decay != 0 && !step.decay_after;
    if (step.max_gradient == infinity && step.max_norm == infinity && !decays) return;
    if (step.max_gradient < infinity)
      for (std::size_t v = 0; v < vectors; v++) {
        const Floats x = g[v] < -step.max_gradient ? all(-step.max_gradient) : g[v];
        g[v] = x > step.max_gradient ? all(step.max_gradient) : x;
      }
    if (step.max_norm < infinity) {
      const float norm = __builtin_sqrtf(sum([&](std::size_t v) { return g[v] * g[v]; }));
      if (norm > step.max_norm)
        for (std::size_t v = 0; v < vectors; v++) g[v] = (step.max_norm / norm) * g[v];
    }
    if (decays)
      for (std::size_t v = 0; v < vectors; v++) g[v] = g[v] + step.decay * w(v);
  }

  // The first moments. Stores the new one.
  SENNIT_INLINE_MEMBER Floats moment1(Floats g, std::size_t v) const {
    const Floats m = step.beta1 * load(state(0, v), columns(v)) + step.beta1_rest * g;
    store(state(0, v), m, columns(v));
    return m;
  }
  SENNIT_INLINE_MEMBER Floats moment2(Floats g, std::size_t v) const {
    const Floats moment = step.beta2 * load(state(1, v), columns(v)) + step.beta2_rest * (g * g);
    store(state(1, v), moment, columns(v));
    return moment;
  }

  // The momentum replaces the gradient.
  SENNIT_INLINE_MEMBER void add_momentum(Floats* g) const {
    for (std::size_t v = 0; v < vectors; v++) {
      const Floats b = step.beta1 * load(state(0, v), columns(v)) + g[v];
      store(state(0, v), b, columns(v));
      g[v] = step.nesterov ? g[v] + step.beta1 * b : b;
    }
  }

  // The new weights of FTRL. Stores z and n.
  SENNIT_INLINE_MEMBER Floats ftrl(Floats w, Floats g, std::size_t v) const {
    const Floats zero{}, high = all(step.l1), low = zero - high;
    const Floats before = load(state(1, v), columns(v)), n = before + g * g, root_of_n = root(n);
    const Floats first = zero - (step.epsilon * w + (w > zero ? high : w < zero ? low : zero));
    const Floats start = before == zero ? first : load(state(0, v), columns(v));
    const Floats z = (start + step.rate * g) - (root_of_n - root(before)) * w;
    store(state(0, v), z, columns(v));
    store(state(1, v), n, columns(v));
    return ((z > high ? high : z < low ? low : z) - z) / (root_of_n + step.epsilon);
  }

  // Writes the sum of the n-th row that is kept.
  SENNIT_INLINE_MEMBER void keep(const RowUpdate& update, const Floats* sum, std::size_t n) const {
    update.rows[n] = number;
    float* const to = update.row_sums + n * dim;
    for (std::size_t v = 0; v < vectors; v++) {
      __builtin_prefetch(to + update_ahead * dim + v * lanes, 1);
      store(to + v * lanes, sum[v], columns(v));
    }
  }

  SENNIT_INLINE_MEMBER void apply(Floats* gradient) const {
    prepare(gradient);
    const auto g = [&](std::size_t v) __attribute__((always_inline)) { return gradient[v]; };
    const auto mean_square = [&] { return sum([&](std::size_t v) { return g(v) * g(v); }) / static_cast<float>(dim); };
    if constexpr (optimizer == Optimizer::sgd) {
      if (step.beta1 != 0) add_momentum(gradient);
      change([&](Floats w, std::size_t v) { return w - step.rate * g(v); });
    } else if constexpr (optimizer == Optimizer::adagrad) {
      change([&](Floats w, std::size_t v) {
        const Floats squares = load(state(0, v), columns(v)) + g(v) * g(v);
        store(state(0, v), squares, columns(v));
        return w - (step.rate * g(v)) / (root(squares) + step.epsilon);
      });
    } else if constexpr (optimizer == Optimizer::row_wise_adagrad) {
      float& squares = table.states[0][number];
      squares = squares + mean_square();
      const float factor = step.rate / (__builtin_sqrtf(squares) + step.epsilon);
      change([&](Floats w, std::size_t v) { return w - factor * g(v); });
    } else if constexpr (optimizer == Optimizer::adam) {
      change([&](Floats w, std::size_t v) {
        const Floats m = moment1(g(v), v);
        return w - (step.scale1 * m) / (root(moment2(g(v), v)) * step.scale2 + step.epsilon);
      });
    } else if constexpr (optimizer == Optimizer::partial_row_wise_adam) {
      float& moment = table.states[1][number];
      moment = step.beta2 * moment + step.beta2_rest * mean_square();
      const float factor = step.scale1 / (__builtin_sqrtf(moment) * step.scale2 + step.epsilon);
      change([&](Floats w, std::size_t v) { return w - factor * moment1(g(v), v); });
    } else if constexpr (optimizer == Optimizer::ftrl) {
      change([&](Floats w, std::size_t v) { return ftrl(w, g(v), v); });
    } else {
      // The direction replaces the gradient. Lanes behind the last column may divide 0 by 0.
      for (std::size_t v = 0; v < vectors; v++) {
        const Floats m = moment1(g(v), v);
        Floats u = (step.scale1 * m) / (root(moment2(g(v), v)) * step.scale2 + step.epsilon);
        if (step.decay != 0 && step.decay_after) u = u + step.decay * w(v);
        gradient[v] = first_lanes(u, columns(v));
      }
      const float of_w = __builtin_sqrtf(sum([&](std::size_t v) { return w(v) * w(v); }));
      const float of_u = __builtin_sqrtf(sum([&](std::size_t v) { return g(v) * g(v); }));
      const float factor = step.rate * (of_w > 0 && of_u > 0 ? of_w / of_u : 1.0f);
      change([&](Floats w, std::size_t v) { return w - factor * g(v); });
    }
  }
};

template <Optimizer optimizer, Precision precision, std::size_t fixed>
SENNIT_INLINE void prefetch_row(const Table& table, std::uint32_t row) {
  if constexpr (optimizer == Optimizer::none) return;
  const std::size_t dim = fixed != 0 ? fixed * lanes : table.dim;
  const std::size_t bytes = row_bytes<precision, fixed>(table);
  const auto fetch = [](const void* from, std::size_t size) __attribute__((always_inline)) {
    for (std::size_t at = 0; at < size; at += cache_line_bytes)
      __builtin_prefetch(static_cast<const std::byte*>(from) + at, 1);
  };
  fetch(table.weight + row * bytes, bytes);
  constexpr bool is_row_wise = optimizer == Optimizer::row_wise_adagrad;
  if (optimizer != Optimizer::sgd || table.states[0] != nullptr)
    fetch(table.states[0] + row * (is_row_wise ? 1 : dim), is_row_wise ? 1 : dim * sizeof(float));
  constexpr bool is_partial = optimizer == Optimizer::partial_row_wise_adam;
  if constexpr (is_partial || optimizer == Optimizer::adam || optimizer == Optimizer::lamb ||
                optimizer == Optimizer::ftrl)
    fetch(table.states[1] + row * (is_partial ? 1 : dim), is_partial ? 1 : dim * sizeof(float));
}

template <std::size_t count>
SENNIT_INLINE bool all_finite(const Floats (&x)[count]) {
  Words wild{};
  for (std::size_t v = 0; v < count; v++) wild |= not_finite(x[v]);
  return !any(wild);
}

template <Optimizer optimizer, Precision precision, std::size_t fixed>
BadRows update_with(const RowUpdate& update) {
  const Entry *const entries = update.entries, *const all_end = entries + update.count;
  BadRows bad;
  std::size_t fetched = 0;
  [[maybe_unused]] std::size_t kept = 0;
  for (std::size_t first = 0, end; first < update.count; first = end) {
    const std::uint32_t row = entries[first].row();
    for (end = first + 1; end < update.count && entries[end].row() == row; end++) {
    }
    const std::size_t until = end + update_ahead < update.count ? end + update_ahead : update.count;
    for (; fetched < until; fetched++)
      if (fetched == 0 || entries[fetched].row() != entries[fetched - 1].row())
        prefetch_row<optimizer, precision, fixed>(*update.table, entries[fetched].row());
    const Row<optimizer, precision, fixed> place(update, row);
    bool finite = true;
    if constexpr (fixed != 0) {
      Floats sum[fixed];
      if (end - first <= chunk_lookups && is_one_slice(update.gradients, entries + first, end - first)) {
        fold_row(update.gradients, {entries + first, end - first, all_end}, sum);
      } else {
        const float* found = sum_run<fixed>(update, entries + first, end - first);
        for (std::size_t v = 0; v < fixed; v++) sum[v] = load(found + v * lanes);
      }
      if constexpr (optimizer == Optimizer::none) {
        place.keep(update, sum, kept++);
      } else {
        finite = all_finite(sum);
        if (finite) place.apply(sum);
      }
    } else {
      float* const found =
          update.known_sum != nullptr ? update.known_sum : sum_run<0>(update, entries + first, end - first);
      auto* sum = reinterpret_cast<Floats*>(found);
      if constexpr (optimizer == Optimizer::none) {
        place.keep(update, sum, kept++);
      } else {
        for (std::size_t v = 0; v < place.vectors; v++) finite = finite && !any(not_finite(sum[v]));
        if (finite) place.apply(sum);
      }
    }
    if (!finite && bad.count++ == 0) bad.first = row;
  }
  return bad;
}

inline float* sum(const RowUpdate& update) { return sum_run<0>(update, update.entries, update.count); }

template <Optimizer optimizer, Precision precision>
BadRows update_in(const RowUpdate& update) {
  if (update.known_sum != nullptr) return update_with<optimizer, precision, 0>(update);
  switch (update.table->dim) {
    case 16:
      return update_with<optimizer, precision, 1>(update);
    case 32:
      return update_with<optimizer, precision, 2>(update);
    case 64:
      return update_with<optimizer, precision, 4>(update);
    case 128:
      return update_with<optimizer, precision, 8>(update);
    default:
      return update_with<optimizer, precision, 0>(update);
  }
}

template <Optimizer optimizer>
BadRows update_for(const RowUpdate& update) {
  switch (update.table->precision) {
    case Precision::fp32:
      return update_in<optimizer, Precision::fp32>(update);
    case Precision::fp16:
      return update_in<optimizer, Precision::fp16>(update);
    case Precision::bf16:
      break;
  }
  return update_in<optimizer, Precision::bf16>(update);
}

inline BadRows update(const RowUpdate& update) {
  switch (update.optimizer) {
    case Optimizer::sgd:
      return update_for<Optimizer::sgd>(update);
    case Optimizer::adagrad:
      return update_for<Optimizer::adagrad>(update);
    case Optimizer::row_wise_adagrad:
      return update_for<Optimizer::row_wise_adagrad>(update);
    case Optimizer::adam:
      return update_for<Optimizer::adam>(update);
    case Optimizer::partial_row_wise_adam:
      return update_for<Optimizer::partial_row_wise_adam>(update);
    case Optimizer::lamb:
      return update_for<Optimizer::lamb>(update);
    case Optimizer::ftrl:
      return update_for<Optimizer::ftrl>(update);
    case Optimizer::none:
      break;
  }
  return update_in<Optimizer::none, Precision::fp32>(update);
}

}  // namespace sennit::kernels::SENNIT_ISA
