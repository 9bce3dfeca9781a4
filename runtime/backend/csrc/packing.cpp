// SPDX-License-Identifier: Apache-2.0
#include "packing.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>

namespace sennit::runtime {

at::Tensor packed_copy(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return tensor.clone(at::MemoryFormat::Contiguous);
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
