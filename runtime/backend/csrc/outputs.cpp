// SPDX-License-Identifier: Apache-2.0
#include "outputs.hpp"

#include <algorithm>

#include "packing.hpp"

namespace sennit::runtime {
namespace {

// True if no two elements share memory: each stride is beyond all that the smaller ones reach. Strides that interleave
// without a common element are refused, too, but no view of torch makes them.
bool elements_are_apart(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense() || tensor.numel() == 0) return true;
  c10::SmallVector<std::pair<int64_t, int64_t>, 5> dimensions;  // stride, size
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension) {
    if (tensor.size(dimension) > 1) dimensions.emplace_back(tensor.stride(dimension), tensor.size(dimension));
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dimensions) {
    if (stride <= reach) return false;
    reach += (size - 1) * stride;
  }
  return true;
}

// Marks the elements of `tensor` in `marks`, which has one for each element from `base`. Returns false if one of them
// was marked before.
bool mark(const at::Tensor& tensor, uintptr_t base, at::Tensor& marks) {
  const auto offset = (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) - base) / tensor.element_size();
  const at::Tensor own = marks.as_strided(tensor.sizes(), tensor.strides(), static_cast<int64_t>(offset));
  const bool is_new = !own.any().item<bool>();
  own.fill_(true);
  return is_new;
}

}  // namespace

Outputs::Span Outputs::span_of(const at::Tensor& tensor, size_t index) {
  const auto first = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension) {
    last += (tensor.size(dimension) - 1) * tensor.stride(dimension);
  }
  return {first, first + (static_cast<uintptr_t>(last) + 1) * tensor.element_size(), index};
}

Outputs::Outputs(std::string_view what, at::TensorList tensors) {
  c10::SmallVector<Span, 4> found;
  for (size_t index = 0; index < tensors.size(); ++index) {
    TORCH_CHECK_VALUE(elements_are_apart(tensors[index]), what, tensors.size() > 1 ? c10::str("[", index, "]") : "",
                      " has elements that share memory (sizes ", tensors[index].sizes(), ", strides ",
                      tensors[index].strides(), "); pass tensor.contiguous()");
    if (tensors[index].numel() != 0) found.push_back(span_of(tensors[index], index));
  }
  const auto by_address = [](const Span& one, const Span& other) { return one.first < other.first; };
  if (!std::is_sorted(found.begin(), found.end(), by_address)) std::sort(found.begin(), found.end(), by_address);

  const auto refuse = [&](const Span& one, const Span& other) {
    const auto [lower, higher] = std::minmax(one.index, other.index);
    TORCH_CHECK_VALUE(false, what, "[", lower, "] and ", what, "[", higher, "] share memory; allowed: ", what,
                      " apart from each other, because each gets data of its own");
  };
  for (size_t begin = 0, end = 0; begin < found.size(); begin = end) {
    uintptr_t last = found[begin].last;
    const at::Tensor& lowest = tensors[found[begin].index];
    bool is_dense = lowest.is_non_overlapping_and_dense();
    for (end = begin + 1; end < found.size() && found[end].first < last; ++end) {
      const at::Tensor& next = tensors[found[end].index];
      last = std::max(last, found[end].last);
      is_dense = is_dense && next.is_non_overlapping_and_dense();
      // Elements of two sizes do not lie between each other.
      if (is_dense || next.element_size() != lowest.element_size()) refuse(found[end - 1], found[end]);
    }
    spans_.push_back({found[begin].first, last, found[begin].index});
    if (end - begin == 1) continue;
    const at::NoGradGuard no_grad;
    const uintptr_t base = found[begin].first;
    const auto elements = static_cast<int64_t>((last - base) / lowest.element_size());
    at::Tensor marks = at::zeros({elements}, at::kBool);
    for (size_t place = begin; place < end; ++place) {
      if (mark(tensors[found[place].index], base, marks)) continue;
      for (size_t earlier = begin; earlier < place; ++earlier) {
        marks.zero_();
        mark(tensors[found[earlier].index], base, marks);
        if (!mark(tensors[found[place].index], base, marks)) refuse(found[earlier], found[place]);
      }
    }
  }
}

at::Tensor Outputs::apart(const at::Tensor& input) const {
  if (input.numel() == 0) return input;
  const Span read = span_of(input, 0);
  const auto next = std::partition_point(spans_.begin(), spans_.end(),
                                         [&](const Span& written) { return written.last <= read.first; });
  if (next == spans_.end() || next->first >= read.last) return input;
  return packed_copy(input);
}

}  // namespace sennit::runtime
