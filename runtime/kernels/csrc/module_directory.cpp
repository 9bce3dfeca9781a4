// SPDX-License-Identifier: Apache-2.0
#include "module_directory.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "id_directory.hpp"

namespace nb = nanobind;

namespace sennit::kernels {
namespace {

template <typename Element>
std::span<Element> span_of(std::uintptr_t address, std::size_t count) {
  return {reinterpret_cast<Element*>(address), count};
}

}  // namespace

void bind_directory(nb::module_& module) {
  module.def("split_ids", [](std::tuple<std::uintptr_t, bool> lengths, std::size_t bags, std::uintptr_t values,
                             std::size_t value_count, std::uint32_t shards, std::uintptr_t lengths_of_shards,
                             std::uintptr_t values_of_shards) {
    const nb::gil_scoped_release release;
    return split_ids(span_of<const std::int64_t>(values, value_count),
                     {reinterpret_cast<const void*>(std::get<0>(lengths)), std::get<1>(lengths)}, bags, shards,
                     reinterpret_cast<std::int32_t*>(lengths_of_shards),
                     reinterpret_cast<std::int64_t*>(values_of_shards));
  });
  module.def("shards_of_ids",
             [](std::uintptr_t values, std::size_t value_count, std::uint32_t shards, std::uintptr_t found) {
               const nb::gil_scoped_release release;
               auto* shard = reinterpret_cast<std::int64_t*>(found);
               for (const std::int64_t id : span_of<const std::int64_t>(values, value_count))
                 *shard++ = shard_of_id(id, shards);
             });
  module.def("counted_ids",
             [](std::uintptr_t values, std::size_t value_count, std::uintptr_t ids, std::uintptr_t counts) {
               const nb::gil_scoped_release release;
               return counted_ids(span_of<const std::int64_t>(values, value_count),
                                  reinterpret_cast<std::int64_t*>(ids), reinterpret_cast<std::uint32_t*>(counts));
             });
  module.def("initial_rows", [](std::uintptr_t ids, std::size_t count, std::size_t first_column, std::size_t columns,
                                std::uint64_t seed, std::uint32_t table, float bound, std::uintptr_t rows) {
    const nb::gil_scoped_release release;
    initial_rows(span_of<const std::int64_t>(ids, count), first_column, columns, seed, table, bound,
                 reinterpret_cast<float*>(rows));
  });
  nb::class_<IdDirectory>(module, "IdDirectory")
      .def("__init__",
           [](IdDirectory* self, std::uintptr_t entries, std::size_t row_count) {
             new (self) IdDirectory(span_of<DirectoryEntry>(entries, row_count));
           })
      .def_prop_ro("used", &IdDirectory::used)
      .def_prop_ro("size_bytes", &IdDirectory::size_bytes)
      .def("find",
           [](IdDirectory& self, std::uintptr_t ids, std::size_t count, std::uintptr_t rows, std::uint32_t step,
              bool once, std::uintptr_t before) {
             const nb::gil_scoped_release release;
             return self.find(span_of<const std::int64_t>(ids, count), reinterpret_cast<std::int64_t*>(rows), step,
                              once, reinterpret_cast<std::uint64_t*>(before));
           })
      .def("undo",
           [](IdDirectory& self, std::uintptr_t rows, std::size_t count, std::uintptr_t before) {
             const nb::gil_scoped_release release;
             self.undo(span_of<const std::int64_t>(rows, count), reinterpret_cast<const std::uint64_t*>(before));
           })
      .def("admit",
           [](IdDirectory& self, std::uintptr_t ids, std::size_t count, std::uintptr_t counts, std::uint32_t step,
              std::uintptr_t rows) {
             const nb::gil_scoped_release release;
             self.admit(span_of<const std::int64_t>(ids, count), reinterpret_cast<const std::uint32_t*>(counts), step,
                        reinterpret_cast<std::int64_t*>(rows));
           })
      .def("victims",
           [](const IdDirectory& self, std::size_t count, int policy, std::uint32_t step, std::uintptr_t keys) {
             const nb::gil_scoped_release release;
             return self.victims(count, static_cast<Eviction>(policy), step, reinterpret_cast<const double*>(keys));
           })
      .def("evict", [](IdDirectory& self, std::uintptr_t rows, std::size_t count) {
        const nb::gil_scoped_release release;
        self.evict(span_of<const std::int64_t>(rows, count));
      });
}

}  // namespace sennit::kernels
