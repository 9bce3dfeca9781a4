// SPDX-License-Identifier: Apache-2.0
// One operation on device memory as the core sees it: a `sennit_device` for its tensors.
//
// It lives until the operation and its copies have ended, even if nobody holds the Work any more. Until then the
// caching allocator must not give the tensors' memory to others.
#pragma once

#include <array>

#include "device_copies.hpp"

namespace sennit::runtime {

class DeviceOperation final : public std::enable_shared_from_this<DeviceOperation> {
 public:
  // `buffers` are those of the plan, in order, all on `device`. The first copy waits for what the current stream writes
  // to them now.
  DeviceOperation(std::shared_ptr<DeviceCopies> copies, c10::Device device, const std::vector<at::Tensor>& buffers);
  ~DeviceOperation();
  DeviceOperation(const DeviceOperation&) = delete;
  DeviceOperation& operator=(const DeviceOperation&) = delete;

  // The argument of sennit_post_on_device. It lets the core hold this object until the operation has ended.
  sennit_device handle();
  // Called if the core did not accept the operation.
  static void drop(const sennit_device& handle);

  // Queues the copy of `request` on `stream`, or copies at once if there is no stream. Called by a queue's thread.
  void copy(const CopyRequest& request, const std::optional<c10::Stream>& stream);
  // The stream that writes the outputs.
  std::optional<c10::Stream> stream() const { return side_->to_device.stream(); }

 private:
  static int start_copy(void* context, sennit_op* op, uint32_t step, const sennit_place* from, const sennit_place* to,
                        uint64_t size_bytes);
  static void* make_scratch(void* context, uint64_t size_bytes);
  static void end(void* context);

  at::Tensor part(const sennit_place& place, uint64_t size_bytes) const;

  const std::shared_ptr<DeviceCopies> copies_;
  const std::shared_ptr<DeviceCopies::Side> side_;
  const c10::Device device_;
  std::vector<at::Tensor> buffers_;  // 1-D, bytes
  std::optional<c10::Event> ready_;  // after the caller's stream has written the buffers
  at::Tensor scratch_;
};

// The bytes of `tensor` as a 1-D view.
at::Tensor byte_view(const at::Tensor& tensor);

}  // namespace sennit::runtime
