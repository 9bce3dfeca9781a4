// SPDX-License-Identifier: Apache-2.0
// Tensors that are not contiguous: the core reads and writes a contiguous copy in their place.
//
// So elements meet by their index, whatever the strides of other ranks are.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <optional>
#include <vector>

namespace sennit::runtime {

// An output of a call, and the contiguous tensor that the core writes.
struct Packed {
  size_t index;  // among the call's outputs
  at::Tensor output;
  at::Tensor packed;
};

at::Tensor packed_copy(const at::Tensor& tensor);
// The same with each number multiplied by `factor`, and rounded once to the accumulator's type and once to its own.
// Integers wrap, and `factor` is whole for them. Of complex numbers both parts are multiplied.
at::Tensor scaled_copy(const at::Tensor& tensor, double factor);
// Copies what the core has written to the outputs, on `stream` if there is one, and waits for it.
void unpack(const std::vector<Packed>& tensors, const std::optional<c10::Stream>& stream);

}  // namespace sennit::runtime
