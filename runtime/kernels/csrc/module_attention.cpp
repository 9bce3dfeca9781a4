// SPDX-License-Identifier: Apache-2.0
#include "module_attention.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention.hpp"

namespace nb = nanobind;

namespace sennit::kernels {
namespace {

// Address, strides of rows and heads, dim.
using Rows = std::tuple<std::uintptr_t, std::size_t, std::size_t, std::size_t>;
// Address, number of entries of a head; 0, 0 for none.
using Bias = std::tuple<std::uintptr_t, std::size_t>;

HeadRows head_rows(const Rows& rows) {
  const auto& [data, row_stride, head_stride, dim] = rows;
  return {reinterpret_cast<void*>(data), row_stride, head_stride, dim};
}

float* floats(std::uintptr_t address) { return reinterpret_cast<float*>(address); }
const std::int64_t* integers(std::uintptr_t address) { return reinterpret_cast<const std::int64_t*>(address); }

// One call of the operator and its gradient.
struct AttentionCall {
  const AttentionSet* set;
  Attention attention;
};

}  // namespace

void bind_attention(nb::module_& module) {
  module.def("attention_sets", [] {
    std::vector<std::string> names;
    for (const AttentionSet& set : attention_sets()) names.emplace_back(set.name);
    return names;
  });
  nb::class_<AttentionCall>(module, "Attention")
      .def("__init__",
           [](AttentionCall* self, const std::string& instruction_set, const Rows& query, const Rows& key,
              const Rows& value, std::uintptr_t offsets, std::uintptr_t targets, std::size_t sequences,
              std::size_t heads, std::size_t context, float scale, float share, bool is_softmax, bool is_causal,
              bool is_bf16, std::int64_t window, const Bias& position_bias, const Bias& time_bias, std::uintptr_t times,
              std::uintptr_t boundaries) {
             const AttentionSet* set = find_attention(instruction_set);
             if (set == nullptr) throw std::invalid_argument("no instruction set " + instruction_set);
             const auto& [position_entries, positions] = position_bias;
             const auto& [time_entries, buckets] = time_bias;
             new (self) AttentionCall{set,
                                      {.query = head_rows(query),
                                       .key = head_rows(key),
                                       .value = head_rows(value),
                                       .offsets = integers(offsets),
                                       .targets = integers(targets),
                                       .sequences = sequences,
                                       .heads = heads,
                                       .context = context,
                                       .scale = scale,
                                       .share = share,
                                       .is_softmax = is_softmax,
                                       .is_causal = is_causal,
                                       .is_bf16 = is_bf16,
                                       .window = window,
                                       .position_bias = floats(position_entries),
                                       .positions = positions,
                                       .time_bias = floats(time_entries),
                                       .times = integers(times),
                                       .boundaries = integers(boundaries),
                                       .boundary_count = buckets == 0 ? 0 : buckets - 1}};
           })
      .def("attend",
           [](const AttentionCall& self, const Rows& output, std::uintptr_t statistics, unsigned threads) {
             const nb::gil_scoped_release release;
             attend(*self.set, self.attention, {head_rows(output), floats(statistics)}, threads);
           })
      .def("differentiate", [](const AttentionCall& self, const Rows& output, std::uintptr_t statistics,
                               const Rows& query, const Rows& key, const Rows& value, std::uintptr_t bias,
                               unsigned threads) {
        const nb::gil_scoped_release release;
        differentiate(
            *self.set, self.attention,
            {head_rows(output), floats(statistics), head_rows(query), head_rows(key), head_rows(value), floats(bias)},
            threads);
      });
}

}  // namespace sennit::kernels
