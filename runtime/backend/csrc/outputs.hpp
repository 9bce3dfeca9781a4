// SPDX-License-Identifier: Apache-2.0
// The memory that a call writes: two outputs may not share any, and an input that shares some is copied first.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string_view>

namespace sennit::runtime {

class Outputs {
 public:
  // Raises if an element would be written twice: by two tensors, which the error names, or by one of overlapping
  // strides. Takes n log n steps for n tensors. Only tensors that lie between each other's elements, as columns of a
  // matrix do, are compared element by element.
  Outputs(std::string_view what, at::TensorList tensors);

  // Returns `input`, or a copy if the call may write to its memory.
  at::Tensor apart(const at::Tensor& input) const;

 private:
  // Addresses from `first` up to, and without, `last`.
  struct Span {
    uintptr_t first;
    uintptr_t last;
    size_t index;  // of the tensor
  };
  static Span span_of(const at::Tensor& tensor, size_t index);

  c10::SmallVector<Span, 4> spans_;  // in order, apart from each other: those that overlap are one
};

}  // namespace sennit::runtime
