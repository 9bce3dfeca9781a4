// SPDX-License-Identifier: Apache-2.0
#include "packing.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

namespace sennit::runtime {

at::Tensor packed_copy(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.clone(at::MemoryFormat::Contiguous);
}

at::Tensor scaled_copy(const at::Tensor& tensor, double factor) {
  const at::NoGradGuard no_grad;
  const at::Tensor copy = packed_copy(tensor);
  if (copy.numel() == 0) return copy;
  at::Tensor numbers = copy.is_complex() ? at::view_as_real(copy) : copy;
  // torch does not multiply unsigned numbers of more than 8 bits. Products have the same bits with a sign.
  switch (numbers.scalar_type()) {
    case at::kUInt16:
      numbers = numbers.view(at::kShort);
      break;
    case at::kUInt32:
      numbers = numbers.view(at::kInt);
      break;
    case at::kUInt64:
      numbers = numbers.view(at::kLong);
      break;
    default:
      break;
  }
  const at::ScalarType type = numbers.scalar_type();
  if (at::isIntegralType(type, false)) {
    numbers.mul_(at::full({}, static_cast<int64_t>(factor), at::kLong).to(type));
  } else if (at::isReducedFloatingType(type)) {
    numbers.copy_(numbers.to(at::kFloat).mul_(at::full({}, factor, at::kFloat)));
  } else {
    numbers.mul_(at::full({}, factor, type));
  }
  return copy;
}

void unpack(const std::vector<Packed>& tensors, const std::optional<c10::Stream>& stream) {
  c10::OptionalStreamGuard guard;
  if (stream) guard.reset_stream(*stream);
  // As for any output of a call: autograd does not see the write, and it may be to a tensor of inference mode.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const Packed& one : tensors) one.output.copy_(one.packed);
  if (stream) stream->synchronize();
}

}  // namespace sennit::runtime
