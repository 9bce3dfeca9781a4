// SPDX-License-Identifier: Apache-2.0
// Programs for Python, over NumPy arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "bindings.hpp"
#include "numpy_arrays.hpp"
#include "program.hpp"

namespace nb = nanobind;

namespace sennit::offload {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Lengths = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A passed-through input column belongs to the caller, so the caller gets an owning copy.
template <typename Element>
nb::object passed_on(const Element* data, std::size_t size, const Buffer<Element>& owner) {
  auto kept = owner;
  if (!kept) {
    kept = buffer<Element>(size);
    std::copy_n(data, size, kept->data());
  }
  return to_numpy<Element, 1>(kept, {size});
}

Column read(nb::handle source, bool is_dense) {
  Column column;
  column.is_dense = is_dense;
  if (is_dense) {
    const auto floats = nb::cast<Floats>(source);
    column.rows = floats.shape(0);
    column.dense = floats.data();
    return column;
  }
  const auto pair = nb::cast<nb::tuple>(source);
  const auto lengths = nb::cast<Lengths>(pair[0]);
  const auto values = nb::cast<Values>(pair[1]);
  column.rows = lengths.shape(0);
  column.lengths = lengths.data();
  column.values = values.data();
  column.count = values.shape(0);
  std::int64_t sum = 0;
  for (std::size_t row = 0; row < column.rows; row++) {
    if (column.lengths[row] < 0) throw std::invalid_argument("a row with a negative length");
    sum += column.lengths[row];
  }
  if (static_cast<std::size_t>(sum) != column.count)
    throw std::invalid_argument("lengths of " + std::to_string(sum) + " ids in all, but there are " +
                                std::to_string(column.count));
  return column;
}

// `sources`: an array of floats, or a pair of lengths and values, in the order of adding.
nb::list run(const Program& program, const nb::list& sources, const std::vector<std::size_t>& outputs) {
  const std::vector<bool>& is_dense = program.sources();
  if (sources.size() != is_dense.size())
    throw std::invalid_argument(std::to_string(sources.size()) + " sources; the program has " +
                                std::to_string(is_dense.size()));
  std::vector<Column> given;
  for (std::size_t n = 0; n < is_dense.size(); n++) given.push_back(read(sources[n], is_dense[n]));
  std::vector<Column> columns;
  {
    const nb::gil_scoped_release others_may_run;
    columns = program.run(std::move(given));
  }
  nb::list found;
  for (const std::size_t output : outputs) {
    const Column& column = columns.at(output);
    if (column.is_dense)
      found.append(passed_on(column.dense, column.rows, column.own_dense));
    else
      found.append(nb::make_tuple(passed_on(column.lengths, column.rows, column.own_lengths),
                                  passed_on(column.values, column.count, column.own_values)));
  }
  return found;
}

}  // namespace

void bind_program(nb::module_& module) {
  nb::class_<Program>(module, "Program")
      .def(nb::init<>())
      .def("dense_source", &Program::dense_source)
      .def("ids_source", &Program::ids_source)
      .def("clamp", [](Program& self, std::size_t x, float low, float high) { return self.add(x, clamp, low, high); })
      .def("look_up", [](Program& self, std::size_t x, int bits,
                         std::vector<std::uint32_t> table) { return self.add(x, look_up, bits, std::move(table)); })
      .def("bucketize", [](Program& self, std::size_t x,
                           std::vector<float> borders) { return self.add(x, bucketize, std::move(borders)); })
      .def("sigrid_hash", [](Program& self, std::size_t ids, std::int64_t salt,
                             std::int64_t max_value) { return self.add(ids, sigrid_hash, salt, max_value); })
      .def("positive_modulus", [](Program& self, std::size_t ids,
                                  std::int64_t divisor) { return self.add(ids, positive_modulus, divisor); })
      .def("clamp_list", [](Program& self, std::size_t ids, std::int64_t low,
                            std::int64_t high) { return self.add(ids, clamp_list, low, high); })
      .def("map_id",
           [](Program& self, std::size_t ids, std::uint64_t multiplier, int shift, int probes,
              std::vector<std::int64_t> keys, std::vector<std::int64_t> values, std::int64_t absent) {
             return self.add(ids, map_id,
                             IdDictionary{multiplier, shift, probes, std::move(keys), std::move(values), absent});
           })
      .def("enumerate", [](Program& self, std::size_t ids) { return self.add(ids, enumerate); })
      .def("first_x", [](Program& self, std::size_t ids, std::int32_t count) { return self.add(ids, first_x, count); })
      .def("ngram", [](Program& self, std::size_t ids, std::int32_t count) { return self.add(ids, ngram, count); })
      .def("cross", &Program::add_cross)
      .def("run", &run);
}

}  // namespace sennit::offload
