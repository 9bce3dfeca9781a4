// SPDX-License-Identifier: Apache-2.0
#include "module_products.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>

#include "products.hpp"
#include "runs.hpp"

namespace nb = nanobind;

namespace sennit::kernels {
namespace {

// MatricesAddress, strides of matrices, rows and columns, address of the members' numbers.
using MatricesAddress = std::tuple<std::uintptr_t, std::size_t, std::size_t, std::size_t, std::uintptr_t>;

Matrices matrices(const MatricesAddress& address) {
  const auto& [data, stride, row_stride, column_stride, numbers] = address;
  return {reinterpret_cast<const float*>(data), stride, row_stride, column_stride,
          reinterpret_cast<const std::int64_t*>(numbers)};
}

// Keeps its scratch memory between calls.
struct Products {
  FoldProducts fold;
  std::vector<Entry> scratch;
};

}  // namespace

void bind_products(nb::module_& module) {
  nb::class_<Products>(module, "Products")
      .def("__init__",
           [](Products* self, const std::string& instruction_set) {
             const FoldProducts fold = find_fold_products(instruction_set);
             if (fold == nullptr) throw std::invalid_argument("no instruction set " + instruction_set);
             new (self) Products{fold, {}};
           })
      .def("runs_of",
           [](Products& self, std::uintptr_t keys, std::size_t members, std::uint32_t key_count,
              std::uintptr_t distinct, std::uintptr_t order, std::uintptr_t starts, std::uintptr_t places) {
             if (members > std::numeric_limits<std::uint32_t>::max())
               throw std::invalid_argument("more than 2^32 - 1 lookups of a table");
             const nb::gil_scoped_release release;
             const auto integers = [](std::uintptr_t address) { return reinterpret_cast<std::int64_t*>(address); };
             const Runs runs{integers(distinct), integers(order), integers(starts), integers(places)};
             return runs_of(integers(keys), members, key_count, runs, self.scratch);
           })
      .def("fold_products",
           [](const Products& self, const MatricesAddress& left, const MatricesAddress& right, std::uintptr_t starts,
              std::size_t items, std::size_t rows, std::size_t depth, std::size_t columns, std::uintptr_t result) {
             const nb::gil_scoped_release release;
             self.fold({matrices(left), matrices(right), reinterpret_cast<const std::int64_t*>(starts), items, rows,
                        depth, columns, reinterpret_cast<float*>(result)});
           });
}

}  // namespace sennit::kernels
