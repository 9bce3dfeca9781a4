// SPDX-License-Identifier: Apache-2.0
// One call on the backend as torch sees it: a Work for one operation of the core, or for several Works.
//
// The thread that waits drives the operation. If a future was asked for, a thread of the core that does nothing else
// completes it and runs its callbacks, so nobody needs to wait. Tensors live until the core has released them, even if
// the Work does not.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "packing.hpp"
#include "sennit/core.h"
#include "torch_versions.hpp"

namespace sennit::runtime {

// State that the works of a backend share with it, and that may outlive it.
struct GroupState {
  explicit GroupState(sennit_comm* communicator);
  ~GroupState();
  GroupState(const GroupState&) = delete;
  GroupState& operator=(const GroupState&) = delete;

  void note_failure(sennit_status status);

  sennit_comm* const comm;
  std::atomic<c10d::ErrorType> error{c10d::ErrorType::SUCCESS};
};

// The future of a Work, made when it is asked for. As with gloo, it is complete when the Work's wait returns. But that
// wait does not wait for the future's callbacks.
class FutureOfWork {
 public:
  using Pointer = c10::intrusive_ptr<c10::ivalue::Future>;

  // Whether the caller made it, and so has to see to its completion. `devices` of its value.
  std::pair<Pointer, bool> get(const std::vector<c10::Device>& devices = {});
  // The work is done: waits for a future that was asked for.
  void wait_until_complete();

 private:
  struct Signal {
    std::mutex mutex;
    std::condition_variable is_complete;
  };
  std::mutex mutex_;
  std::shared_ptr<Signal> signal_;  // made with the future: most Works are never asked for one
  Pointer future_;
};

// The torch exception for a failed operation: ValueError for mistakes of the caller, DistNetworkError for devices,
// DistBackendError for peers and deadlines.
std::exception_ptr make_error(sennit_status status, const std::string& message);

class SennitWork final : public c10d::Work {
 public:
  // Takes over the reference to `op`. `outputs` is the future's value, `held` are tensors that must live, too. Those of
  // `packed` are copied to their outputs before anyone hears that the operation is done. `stream` writes the outputs of
  // a device operation.
  SennitWork(std::shared_ptr<GroupState> group, c10d::OpType type, const char* title, sennit_op* op,
             std::vector<at::Tensor> outputs, std::vector<at::Tensor> held, std::vector<Packed> packed,
             std::optional<c10::Stream> stream = std::nullopt);
  ~SennitWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

 private:
  static void on_done(void* self);
  std::exception_ptr failure() const;
  void end_profile();
  // Once the operation has succeeded. Whoever comes first copies, and others wait.
  void unpack();

  const std::shared_ptr<GroupState> group_;
  const char* const title_;
  sennit_op* const op_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> held_;
  const std::vector<Packed> packed_;
  std::once_flag is_unpacked_;
  const std::optional<c10::Stream> stream_;
  FutureOfWork future_;
};

// Several coalesced calls as one Work: done when all are done, failed when one has failed.
class JointWork final : public c10d::Work {
 public:
  JointWork(int rank, c10d::OpType type, std::vector<c10::intrusive_ptr<c10d::Work>> parts,
            std::vector<at::Tensor> outputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
  const std::vector<at::Tensor> outputs_;
  FutureOfWork future_;
};

}  // namespace sennit::runtime
