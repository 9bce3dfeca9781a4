// SPDX-License-Identifier: Apache-2.0
// Converts whole rows between fp16 or bf16 and float32, for a store of such rows under a cache of float32.
#pragma once

#include "rounding.hpp"

namespace sennit::kernels::SENNIT_ISA {

template <Precision precision>
SENNIT_INLINE void narrow_to(const Table& table, const Step& step, std::uint32_t row, const float* from,
                             std::byte* to) {
  Words words[4] = {};
  for (std::size_t column = 0; column < table.dim; column += lanes) {
    const std::size_t v = column / lanes, rest = table.dim - column, count = rest < lanes ? rest : lanes;
    if (step.is_stochastic && v % 4 == 0) random_words(table, step, row, v / 4, words);
    store_row<precision>(to + column * 2, load(from + column, count), count, step.is_stochastic, words[v % 4]);
  }
}

inline void narrow_row(const Table& table, const Step& step, std::uint32_t row, const float* from, std::byte* to) {
  if (table.precision == Precision::fp16)
    narrow_to<Precision::fp16>(table, step, row, from, to);
  else
    narrow_to<Precision::bf16>(table, step, row, from, to);
}

template <Precision precision>
SENNIT_INLINE void widen_from(const Table& table, const std::byte* from, float* to) {
  for (std::size_t column = 0; column < table.dim; column += lanes) {
    const std::size_t rest = table.dim - column, count = rest < lanes ? rest : lanes;
    store(to + column, load_row<precision>(from + column * 2, count), count);
  }
}

inline void widen_row(const Table& table, const std::byte* from, float* to) {
  if (table.precision == Precision::fp16)
    widen_from<Precision::fp16>(table, from, to);
  else
    widen_from<Precision::bf16>(table, from, to);
}

}  // namespace sennit::kernels::SENNIT_ISA
