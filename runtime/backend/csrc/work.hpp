// SPDX-License-Identifier: Apache-2.0
// One call on the backend, as torch sees it: a Work over one operation of the core, or over several Works.
//
// The thread that waits drives the operation. A future, once asked for, is completed by whichever thread
// finishes it, so nobody needs to wait. Tensors live until the core has let go of them, even when the Work does not.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "sennit/core.h"

namespace sennit::runtime {

// What the works of one backend share with it, and may outlive it by.
struct GroupState {
  explicit GroupState(sennit_comm* communicator);
  ~GroupState();
  GroupState(const GroupState&) = delete;
  GroupState& operator=(const GroupState&) = delete;

  void note_failure(sennit_status status);
  // Waits until no future is being completed any more; such a thread may need the GIL.
  void wait_for_futures(std::chrono::microseconds limit);

  sennit_comm* const comm;
  std::atomic<c10d::ErrorType> error{c10d::ErrorType::SUCCESS};
  std::atomic<uint32_t> open_futures{0};
};

// The torch exception for a failed operation: ValueError for the caller's mistakes, DistNetworkError for devices,
// DistBackendError for everything about peers and deadlines.
std::exception_ptr make_error(sennit_status status, const std::string& message);

class SennitWork final : public c10d::Work {
 public:
  // Takes over the reference on `op`. `outputs` is what the future yields, `held` what else must live. `stream`: of a
  // device's outputs, which are written when the operation is done.
  SennitWork(std::shared_ptr<GroupState> group, c10d::OpType type, const char* title, sennit_op* op,
             std::vector<at::Tensor> outputs, std::vector<at::Tensor> held,
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

  const std::shared_ptr<GroupState> group_;
  const char* const title_;
  sennit_op* const op_;
  std::vector<at::Tensor> outputs_;
  std::vector<at::Tensor> held_;
  const std::optional<c10::Stream> stream_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Several calls that were coalesced into one: done when all are, failed when one has.
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
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace sennit::runtime
