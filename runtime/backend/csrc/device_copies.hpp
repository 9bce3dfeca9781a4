// SPDX-License-Identifier: Apache-2.0
// Copies between a device and the host, with a thread and a stream for each direction.
//
// The core says which bytes to copy (sennit_device, core.h) and never waits for a copy: it is queued, and the thread
// tells the core when it is done. Only device-generic interfaces of c10 are used, so the same code serves every
// accelerator that torch knows, and the host itself (without streams), on which it is tested.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "sennit/core.h"

namespace sennit::runtime {

class DeviceOperation;

// One copy. It keeps the operation's tensors and scratch alive until it is done, whatever the outcome.
struct CopyRequest {
  std::shared_ptr<DeviceOperation> operation;
  sennit_op* op;  // a reference
  uint32_t step;
  sennit_place from;
  sennit_place to;
  uint64_t size_bytes;
};

// Runs copies in order on its own stream.
class CopyQueue {
 public:
  explicit CopyQueue(c10::Device device);
  ~CopyQueue();
  CopyQueue(const CopyQueue&) = delete;
  CopyQueue& operator=(const CopyQueue&) = delete;

  void push(CopyRequest request);
  std::optional<c10::Stream> stream() const { return state_->stream; }
  // Drops copies that have not begun, and ends the thread. If a device holds it up for longer than `limit`, it is left.
  void stop(std::chrono::microseconds limit);

 private:
  struct Batch {
    std::vector<CopyRequest> requests;
    std::optional<c10::Event> done;
  };
  struct State {
    explicit State(c10::Device device);
    void serve();
    Batch issue(std::deque<CopyRequest> requests);
    void finish(Batch batch);

    const c10::Device device;
    std::optional<c10::Stream> stream;  // none for the host
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<CopyRequest> waiting;
    bool stopping = false;
    bool ended = false;
  };

  const std::shared_ptr<State> state_;  // shared with the thread, which may outlive this object
  std::thread thread_;
};

// All copies of one backend, on all of its devices.
class DeviceCopies {
 public:
  // The copies of a device, made when first needed.
  struct Side {
    explicit Side(c10::Device device) : to_host(device), to_device(device) {}
    CopyQueue to_host;
    CopyQueue to_device;
  };
  std::shared_ptr<Side> side_of(c10::Device device);

  // Host memory for copies, reused, and pinned if `device` is an accelerator.
  at::Tensor take_scratch(c10::Device device, uint64_t size_bytes);
  void give_scratch(c10::Device device, at::Tensor scratch);

  void on_operation_posted();
  void on_operation_ended();
  // Waits until no operation on device memory is in flight. Returns false if `limit` passes first.
  bool drain(std::chrono::microseconds limit);
  // Ends the threads. Operations in flight must have ended before (abort, shutdown).
  void stop(std::chrono::microseconds limit);

 private:
  // The number of operations of a group that the core runs at a time.
  static constexpr size_t KEPT_SCRATCH = 4;

  std::mutex mutex_;
  std::condition_variable ended_;
  std::map<c10::Device, std::shared_ptr<Side>, bool (*)(c10::Device, c10::Device)> sides_{
      [](c10::Device one, c10::Device other) {
        return std::pair(one.type(), one.index()) < std::pair(other.type(), other.index());
      }};
  std::vector<std::pair<c10::Device, at::Tensor>> kept_;
  size_t in_flight_ = 0;
};

}  // namespace sennit::runtime
