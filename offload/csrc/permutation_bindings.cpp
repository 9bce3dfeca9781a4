// SPDX-License-Identifier: Apache-2.0
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>

#include <stdexcept>
#include <string>

#include "bindings.hpp"
#include "permutation.hpp"

namespace nb = nanobind;

namespace sennit::offload {
namespace {

using Places = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void permute(std::uint64_t size, const KeyedPermutation::Keys& keys, Places places) {
  if (size < 1 || size > std::uint64_t{1} << 62)
    throw std::invalid_argument("size " + std::to_string(size) + "; allowed: 1 to 2^62");
  const std::span<std::int64_t> span(places.data(), places.shape(0));
  for (const std::int64_t place : span)
    if (place < 0 || static_cast<std::uint64_t>(place) >= size)
      throw std::invalid_argument("place " + std::to_string(place) + "; allowed: [0, " + std::to_string(size) + ")");
  const nb::gil_scoped_release released;
  KeyedPermutation(size, keys).apply(span);
}

}  // namespace

void bind_permutation(nb::module_& module) {
  module.def("permute", permute, nb::arg("size"), nb::arg("keys"), nb::arg("places").noconvert());
}

}  // namespace sennit::offload
