// SPDX-License-Identifier: Apache-2.0
#include "device_operation.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "arguments.hpp"
#include "stand_in.hpp"

namespace sennit::runtime {
namespace {

using Holder = std::shared_ptr<DeviceOperation>;

}  // namespace

at::Tensor byte_view(const at::Tensor& tensor) {
  auto view = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(tensor.device()));
  const int64_t offset = tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  view.set_(tensor.storage(), offset, {static_cast<int64_t>(data_bytes(tensor))}, {1});
  return view;
}

DeviceOperation::DeviceOperation(std::shared_ptr<DeviceCopies> copies, c10::Device device,
                                 const std::vector<at::Tensor>& buffers)
    : copies_(std::move(copies)), side_(copies_->side_of(device)), device_(device) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& buffer : buffers) buffers_.push_back(byte_view(buffer));
  if (!device_.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device_.type());
    ready_.emplace(device_.type());
    ready_->record(guard.getStream(device_));
  }
}

DeviceOperation::~DeviceOperation() {
  if (scratch_.defined()) copies_->give_scratch(device_, std::move(scratch_));
}

sennit_device DeviceOperation::handle() {
  copies_->on_operation_posted();
  return {new Holder(shared_from_this()), &start_copy, &make_scratch, &end};
}

void DeviceOperation::drop(const sennit_device& handle) { end(handle.context); }

int DeviceOperation::start_copy(void* context, sennit_op* op, uint32_t step, const sennit_place* from,
                                const sennit_place* to, uint64_t size_bytes) {
  const Holder& operation = *static_cast<const Holder*>(context);
  sennit_op_retain(op);
  try {
    CopyQueue& queue = to->host != nullptr ? operation->side_->to_host : operation->side_->to_device;
    queue.push({operation, op, step, *from, *to, size_bytes});
    return 0;
  } catch (const std::exception&) {
    sennit_op_release(op);
    return 1;
  }
}

void* DeviceOperation::make_scratch(void* context, uint64_t size_bytes) {
  DeviceOperation& operation = **static_cast<Holder*>(context);
  try {
    operation.scratch_ = operation.copies_->take_scratch(operation.device_, size_bytes);
    return operation.scratch_.mutable_data_ptr();
  } catch (const std::exception&) {
    return nullptr;
  }
}

void DeviceOperation::end(void* context) {
  auto* holder = static_cast<Holder*>(context);
  const std::shared_ptr<DeviceCopies> copies = (*holder)->copies_;
  delete holder;
  copies->on_operation_ended();
}

at::Tensor DeviceOperation::part(const sennit_place& place, uint64_t size_bytes) const {
  const auto size = static_cast<int64_t>(size_bytes);
  if (place.host == nullptr) return buffers_[place.buffer].narrow(0, static_cast<int64_t>(place.offset), size);
  return scratch_.narrow(0, static_cast<int64_t>(place.offset), size);
}

void DeviceOperation::copy(const CopyRequest& request, const std::optional<c10::Stream>& stream) {
  if (stream) {
    ready_->block(*stream);
  } else {
    stand_in::delay();
  }
  part(request.to, request.size_bytes).copy_(part(request.from, request.size_bytes), /*non_blocking=*/true);
}

}  // namespace sennit::runtime
