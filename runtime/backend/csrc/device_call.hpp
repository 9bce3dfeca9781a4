// SPDX-License-Identifier: Apache-2.0
// One operation on device memory, as the core sees it: a `sennit_device` over the call's tensors.
//
// It lives as long as the operation or a copy of it does, even where nobody holds the Work any more: that is what keeps
// the caching allocator from handing the tensors' memory to others.
#pragma once

#include <array>

#include "device_copies.hpp"

namespace sennit::runtime {

class DeviceCall final : public std::enable_shared_from_this<DeviceCall> {
 public:
  // `buffers`: the plan's, in order, all on `device`. What the current stream writes to them now is written before the
  // first copy.
  DeviceCall(std::shared_ptr<DeviceCopies> copies, c10::Device device, const std::vector<at::Tensor>& buffers);
  ~DeviceCall();
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  // For sennit_post_on_device. The core holds the call through it until the operation has ended.
  sennit_device handle();
  // The core did not take it.
  static void drop(const sennit_device& handle);

  // Queues the bytes of `request` on `stream`, or copies them where there is none. In a queue's thread.
  void copy(const CopyRequest& request, const std::optional<c10::Stream>& stream);
  // Where outputs are written.
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
  std::vector<at::Tensor> buffers_;  // 1-D bytes
  std::optional<c10::Event> ready_;  // the caller's stream has written the buffers
  at::Tensor scratch_;
};

// The bytes of `tensor` as a 1-D view.
at::Tensor byte_view(const at::Tensor& tensor);

}  // namespace sennit::runtime
