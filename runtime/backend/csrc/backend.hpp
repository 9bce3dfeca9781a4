// SPDX-License-Identifier: Apache-2.0
// sennit as a backend of torch.distributed: each call is checked, shaped into a plan and posted.
//
// One call is one operation of the core, for host and device memory. For device tensors the core says which bytes to
// copy and when, and device_copies.cpp copies them.
#pragma once

#include <c10/util/FunctionRef.h>

#include <array>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "call.hpp"
#include "device_operation.hpp"
#include "poster.hpp"
#include "torch_versions.hpp"

namespace sennit::runtime {

class SennitBackend final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout) : c10d::Backend::Options("sennit", timeout) {}
    size_t plan_cache_bytes = 16 * 1024 * 1024;
    bool is_coded = false;  // an allreduce sends codes, and its plan is for one size
  };

  // Which sizes are not direct of an alltoall of equal parts, an allgather or a reduce_scatter: bit k, from 1 to 62, is
  // for those above 2^(k-1) bytes in all, up to 2^k.
  using StagedClasses = std::function<uint64_t(Collective)>;

  // Makes the backend of this group without some of its ranks. The flag says whether to abort operations in flight.
  using Shrink = std::function<c10::intrusive_ptr<c10d::Backend>(const std::vector<int64_t>& excluded, bool abort)>;

  // `owner` has to live as long as the backend. It is only stored and returned.
  SennitBackend(sennit_comm* comm, CompilePlan compile, StagedClasses staged_classes, Shrink shrink,
                std::shared_ptr<void> owner, c10::intrusive_ptr<Options> options);
  ~SennitBackend() override;

  c10::intrusive_ptr<Options> options() const { return options_; }
  const std::shared_ptr<void>& owner() const { return owner_; }
  // Closes every open backend of this process. Called when the interpreter exits, while threads still run.
  static void close_all();

  const std::string getBackendName() const override { return "sennit"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  // batch_isend_irecv starts its messages one by one then. They gain nothing from each other, and a coalescing block of
  // torch stays open after an error.
  bool supportsCoalescing() const override { return false; }
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                           const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return false; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  // For a block of `_coalescing_manager` with a device. Only calls of its thread belong to it.
  void startCoalescing() override;
  // Raises what the first refused call of the block has raised.
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  using WorkPointer = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPointer allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override;
  WorkPointer gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPointer scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPointer reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override;
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override;
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPointer send(Tensors& tensors, int peer, int tag) override;
  WorkPointer recv(Tensors& tensors, int peer, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;
  WorkPointer barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  // Runs `call`, which checks and starts a call of the user. In a coalescing block an error is remembered until the
  // block ends, and nothing is started after it: torch does not close a block that is left by an error, and does
  // nothing in it from then on.
  WorkPointer guarded(c10::function_ref<WorkPointer()> call);
  bool is_coalescing() const { return coalescing_thread_.load() == std::this_thread::get_id(); }
  // Starts a call. Waits for a synchronous one, and then returns null, as ProcessGroupNCCL does: torch's functions take
  // that, and it saves an object of Python, a second call of it and two changes of the GIL.
  WorkPointer run(Call call);
  WorkPointer start(Call call);
  void choose_way(Call& call);
  void cut_shares(Call& call);
  bool is_staged(const Call& call);
  // The body of an all_reduce of a sparse tensor.
  WorkPointer sum_sparse(at::Tensor& tensor, const c10d::AllreduceOptions& options);
  WorkPointer start_all(c10d::OpType type, std::vector<Call> calls);
  WorkPointer post(Call call);
  WorkPointer post_on_device(Call call);
  Call new_call(const char* title, c10d::OpType type, Collective collective, const at::Tensor& like,
                std::chrono::milliseconds timeout, bool async) const;
  Call allreduce_call(const char* what, at::Tensor& tensor, const c10d::AllreduceOptions& options) const;
  Call allgather_call(const char* what, at::Tensor& output, at::Tensor& input,
                      const c10d::AllgatherOptions& options) const;
  Call allgather_list_call(Tensors& outputs, at::Tensor& input, const c10d::AllgatherOptions& options) const;
  Call reduce_scatter_call(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) const;
  WorkPointer point_to_point(const char* title, c10d::OpType type, Tensors& tensors, uint32_t peer, int tag,
                             bool is_send);
  // True in a child of fork: the connections belong to the parent.
  bool is_inherited() const { return sennit_comm_is_inherited(group_->comm) != 0; }
  void check_usable() const;

  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<void> owner_;
  const StagedClasses staged_classes_;
  // What it said, by collective, and bit 0. Zero: not asked yet. To ask takes milliseconds, and few groups need it.
  std::array<std::atomic<uint64_t>, static_cast<size_t>(Collective::BARRIER) + 1> staged_{};
  const Shrink shrink_;
  const std::shared_ptr<GroupState> group_;
  const std::shared_ptr<Poster> poster_;
  const std::shared_ptr<DeviceCopies> copies_;
  std::atomic<std::thread::id> coalescing_thread_{};  // of none, while no block is open
  std::vector<WorkPointer> coalesced_;                // of that thread
  std::exception_ptr refusal_;
  std::atomic<bool> is_shut_down_{false};
};

}  // namespace sennit::runtime
