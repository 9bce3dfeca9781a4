// SPDX-License-Identifier: Apache-2.0
// The operator for Python. Tensors are passed as addresses, so the extension works with every torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "ids.hpp"
#include "instruction_sets.hpp"
#include "module_attention.hpp"
#include "module_directory.hpp"
#include "module_products.hpp"
#include "operator.hpp"

namespace nb = nanobind;

namespace sennit::kernels {
namespace {

template <typename Element>
Element* pointer(std::uintptr_t address) {
  return reinterpret_cast<Element*>(address);
}

struct Call {
  Batch batch;
  std::vector<std::uint16_t> slices;
  std::vector<Block> blocks;
};

// Lengths or values: address, and whether elements have 64 bits.
using Address = std::tuple<std::uintptr_t, bool>;

Batch batch_of(const Address& lengths, const Address& values, std::uintptr_t weights, int pooling) {
  return {{pointer<const void>(std::get<0>(lengths)), std::get<1>(lengths)},
          {pointer<const void>(std::get<0>(values)), std::get<1>(values)},
          pointer<const float>(weights),
          static_cast<Pooling>(pooling)};
}

Call call_of(const Operator& op, const std::vector<std::uint32_t>& tables, const std::vector<std::size_t>& bags,
             const Address& lengths, const Address& values, std::uintptr_t weights, int pooling,
             std::vector<std::uint16_t> slices = {}) {
  Call call{};
  call.batch = batch_of(lengths, values, weights, pooling);
  call.slices = std::move(slices);
  if (!call.slices.empty()) call.batch.slices = call.slices.data();
  call.blocks = op.blocks(call.batch, tables, bags);
  // Sorted entries hold 32-bit numbers of bags and lookups.
  constexpr std::size_t most = std::numeric_limits<std::uint32_t>::max();
  if (!call.blocks.empty()) {
    const Block& last = call.blocks.back();
    if (last.first_bag + last.bag_count > most || last.first_lookup + last.lookup_count > most)
      throw std::invalid_argument("more than 2^32 - 1 bags or lookups in a batch");
  }
  return call;
}

}  // namespace

NB_MODULE(_kernels, module) {
  // Where a program holds results at its end, torch holds their autograd graph, with objects of ours, until after the
  // end of Python. These are no leaks, so only a build without optimisation lists what is left.
#ifdef __OPTIMIZE__
  nb::set_leak_warnings(false);
#endif
  module.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : available_kernels()) names.emplace_back(kernels->name);
    return names;
  });

  bind_attention(module);
  bind_products(module);
  bind_directory(module);
  module.def("is_sound", [](const std::vector<std::uint64_t>& row_counts, const std::vector<std::size_t>& bags,
                            Address lengths, Address values, std::size_t value_count) {
    const nb::gil_scoped_release release;
    return is_sound(batch_of(lengths, values, 0, 0), row_counts, bags, value_count);
  });

  module.def("split_rows", [](Address lengths, std::size_t bags, Address values, std::size_t value_count,
                              const std::vector<std::int64_t>& borders, std::uintptr_t lengths_of_shards,
                              std::uintptr_t values_of_shards) {
    const nb::gil_scoped_release release;
    const Batch batch = batch_of(lengths, values, 0, 0);
    return split_rows(batch.lengths, bags, batch.values, value_count, borders, pointer<std::int32_t>(lengths_of_shards),
                      pointer<void>(values_of_shards));
  });
  module.def("distinct", [](Address values, std::size_t value_count, std::uintptr_t ids, std::uintptr_t places) {
    const nb::gil_scoped_release release;
    return static_cast<std::ptrdiff_t>(distinct(batch_of({}, values, 0, 0).values, value_count,
                                                pointer<std::int64_t>(ids), pointer<std::int64_t>(places)));
  });

  nb::class_<Operator>(module, "Operator")
      .def("__init__",
           [](Operator* self, const std::string& instruction_set, int optimizer, unsigned threads) {
             const Kernels* kernels = find_kernels(instruction_set);
             if (kernels == nullptr) throw std::invalid_argument("no instruction set " + instruction_set);
             new (self) Operator(*kernels, static_cast<Optimizer>(optimizer), threads);
           })
      .def("add",
           [](Operator& self, std::uintptr_t weight, std::uint32_t row_count, std::uint32_t dim, int precision,
              std::uint64_t first_row, std::uint32_t stream, std::uintptr_t state1, std::uintptr_t state2,
              std::uintptr_t row_numbers) {
             self.add({pointer<std::byte>(weight),
                       row_count,
                       dim,
                       static_cast<Precision>(precision),
                       first_row,
                       stream,
                       {pointer<float>(state1), pointer<float>(state2)},
                       pointer<const std::uint64_t>(row_numbers)});
           })
      .def("lookup",
           [](const Operator& self, const std::vector<std::uint32_t>& tables, const std::vector<std::size_t>& bags,
              Address lengths, Address values, std::uintptr_t weights, int pooling, std::uintptr_t output) {
             const nb::gil_scoped_release release;
             const Call call = call_of(self, tables, bags, lengths, values, weights, pooling);
             self.lookup(call.batch, call.blocks, pointer<float>(output));
           })
      .def("weight_gradient",
           [](const Operator& self, const std::vector<std::uint32_t>& tables, const std::vector<std::size_t>& bags,
              Address lengths, Address values, std::uintptr_t weights, int pooling, std::uintptr_t gradient,
              std::uintptr_t result) {
             const nb::gil_scoped_release release;
             const Call call = call_of(self, tables, bags, lengths, values, weights, pooling);
             self.weight_gradient(call.batch, call.blocks, pointer<const float>(gradient), pointer<float>(result));
           })
      .def("update",
           [](Operator& self, const std::vector<std::uint32_t>& tables, const std::vector<std::size_t>& bags,
              Address lengths, Address values, std::uintptr_t weights, int pooling, std::vector<std::uint16_t> slices,
              std::uintptr_t gradient, const std::vector<float>& constants, bool decay_after, bool nesterov,
              bool is_stochastic, std::uint32_t number, std::uint64_t seed) {
             if (constants.size() != 13) throw std::invalid_argument("13 constants of a step");
             const float* c = constants.data();
             const Step step{c[0], c[1],  c[2],  c[3],  c[4],        c[5],     c[6],          c[7],   c[8],
                             c[9], c[10], c[11], c[12], decay_after, nesterov, is_stochastic, number, seed};
             std::vector<BadTable> bad;
             {
               const nb::gil_scoped_release release;
               const Call call = call_of(self, tables, bags, lengths, values, weights, pooling, std::move(slices));
               bad = self.update(call.batch, call.blocks, pointer<const float>(gradient), step);
             }
             std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint32_t>> found;
             for (const BadTable& table : bad) found.emplace_back(table.table, table.row_count, table.first_row);
             return found;
           })
      .def("sum_rows",
           [](Operator& self, const std::vector<std::uint32_t>& tables, const std::vector<std::size_t>& bags,
              Address lengths, Address values, std::uintptr_t weights, int pooling, std::vector<std::uint16_t> slices,
              std::uintptr_t gradient, const nb::callable& make_room) {
             const nb::gil_scoped_release release;
             const Call call = call_of(self, tables, bags, lengths, values, weights, pooling, std::move(slices));
             self.sum_rows(call.batch, call.blocks, pointer<const float>(gradient),
                           [&](std::uint32_t table, std::size_t count) -> RowSums {
                             const nb::gil_scoped_acquire acquire;
                             const auto [rows, sums] =
                                 nb::cast<std::pair<std::uintptr_t, std::uintptr_t>>(make_room(table, count));
                             return {pointer<std::int64_t>(rows), pointer<float>(sums)};
                           });
           })
      .def_prop_ro("instruction_set", &Operator::instruction_set)
      .def_prop_ro("scratch_bytes", &Operator::scratch_bytes);
}

}  // namespace sennit::kernels
