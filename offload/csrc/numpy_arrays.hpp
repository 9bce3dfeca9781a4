// SPDX-License-Identifier: Apache-2.0
// Buffers as NumPy arrays that keep the buffer alive.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstddef>

#include "column.hpp"

namespace sennit::offload {

// A view: the array holds the buffer.
template <typename Element, std::size_t dimensions>
nanobind::object to_numpy(const Buffer<Element>& owner, const std::array<std::size_t, dimensions>& shape) {
  const nanobind::capsule capsule(new Buffer<Element>(owner),
                                  [](void* held) noexcept { delete static_cast<Buffer<Element>*>(held); });
  return nanobind::cast(nanobind::ndarray<nanobind::numpy, Element, nanobind::ndim<dimensions>>(
      owner->data(), dimensions, shape.data(), capsule));
}

}  // namespace sennit::offload
