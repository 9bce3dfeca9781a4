// SPDX-License-Identifier: Apache-2.0
// Every collective and point-to-point call: its checks, its plan and its buffers.
#include <algorithm>

#include "arguments.hpp"
#include "backend.hpp"
#include "outputs.hpp"

namespace sennit::runtime {
namespace {

uint64_t count_of(const at::Tensor& tensor) { return static_cast<uint64_t>(tensor.numel()); }

void check_tensor_count(const char* what, const at::Tensor& tensor, uint64_t expected, const std::string& why) {
  TORCH_CHECK_VALUE(count_of(tensor) == expected, what, " has ", count_of(tensor), " elements; needed: ", expected,
                    " (", why, ")");
}

bool is_same_memory(const at::Tensor& one, const at::Tensor& other) {
  if (one.const_data_ptr() != other.const_data_ptr() || one.numel() != other.numel()) return false;
  return (one.is_contiguous() && other.is_contiguous()) ||
         (one.sizes() == other.sizes() && one.strides() == other.strides());
}

// Whether `part` is this rank's of the equal parts of `whole`.
bool is_part(const at::Tensor& part, const at::Tensor& whole, int rank) {
  if (part.numel() == 0 || !part.is_contiguous() || !whole.is_contiguous()) return false;
  const auto* first = static_cast<const std::byte*>(whole.const_data_ptr());
  return part.const_data_ptr() == first + static_cast<uint64_t>(rank) * data_bytes(part);
}

void check_pairs(const char* what, size_t outputs, size_t inputs) {
  TORCH_CHECK_VALUE(outputs == inputs && outputs > 0, what, " has ", outputs, " outputs and ", inputs,
                    " inputs; allowed: as many of each, at least 1");
}

}  // namespace

using c10d::OpType;

Call SennitBackend::allreduce_call(const char* what, at::Tensor& tensor, const c10d::AllreduceOptions& options) const {
  check_tensor(what, tensor);
  const Outputs written(what, tensor);
  Call call =
      new_call("sennit all_reduce", OpType::ALLREDUCE, Collective::ALLREDUCE, tensor, options.timeout, options.asyncOp);
  call.set_reduce(options.reduceOp, tensor.scalar_type());
  call.counts.push_back(count_of(tensor));
  call.outputs.push_back(tensor);
  return call;
}

SennitBackend::WorkPointer SennitBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return guarded([&] {
    TORCH_CHECK_VALUE(tensors.size() == 1, "tensors has ", tensors.size(), " tensors; exactly 1 is allowed");
    if (tensors[0].is_sparse()) return sum_sparse(tensors[0], options);
    return run(allreduce_call("tensor", tensors[0], options));
  });
}

SennitBackend::WorkPointer SennitBackend::allreduce_coalesced(Tensors& tensors,
                                                              const c10d::AllreduceCoalescedOptions& options) {
  return guarded([&] {
    TORCH_CHECK_VALUE(!tensors.empty(), "tensors is empty; at least 1 is needed");
    std::vector<Call> calls;
    for (at::Tensor& tensor : tensors) {
      calls.push_back(allreduce_call("tensors", tensor, options));
      check_same_type("tensors", tensor, tensors[0]);
    }
    return start_all(OpType::ALLREDUCE_COALESCED, std::move(calls));
  });
}

SennitBackend::WorkPointer SennitBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return guarded([&] {
    check_single("tensors", tensors);
    check_rank("root", options.rootRank, size_);
    const Outputs written("tensor", tensors[0]);
    Call call = new_call("sennit broadcast", OpType::BROADCAST, Collective::BROADCAST, tensors[0], options.timeout,
                         options.asyncOp);
    call.root = static_cast<uint32_t>(options.rootRank);
    call.counts.push_back(count_of(tensors[0]));
    call.outputs.push_back(tensors[0]);
    return run(std::move(call));
  });
}

SennitBackend::WorkPointer SennitBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return guarded([&] {
    check_single("tensors", tensors);
    check_rank("root", options.rootRank, size_);
    const Outputs written("tensor", tensors[0]);
    Call call =
        new_call("sennit reduce", OpType::REDUCE, Collective::REDUCE, tensors[0], options.timeout, options.asyncOp);
    call.root = static_cast<uint32_t>(options.rootRank);
    call.set_reduce(options.reduceOp, tensors[0].scalar_type());
    call.counts.push_back(count_of(tensors[0]));
    call.outputs.push_back(tensors[0]);
    return run(std::move(call));
  });
}

Call SennitBackend::allgather_call(const char* what, at::Tensor& output, at::Tensor& input,
                                   const c10d::AllgatherOptions& options) const {
  check_tensor("input", input);
  check_tensor(what, output);
  check_same_type(what, output, input);
  const uint64_t count = count_of(input);
  check_tensor_count(what, output, count * static_cast<uint64_t>(size_),
                     c10::str(size_, " ranks times the input's ", count));
  const Outputs written(what, output);
  Call call = new_call("sennit all_gather", OpType::_ALLGATHER_BASE, Collective::ALLGATHER, input, options.timeout,
                       options.asyncOp);
  call.in_place = is_part(input, output, rank_);
  call.counts.append(static_cast<size_t>(size_), count);
  call.inputs.push_back(call.in_place ? input : written.apart(input));
  call.outputs.push_back(output);
  return call;
}

SennitBackend::WorkPointer SennitBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                          const c10d::AllgatherOptions& options) {
  return guarded([&] { return run(allgather_call("output", output, input, options)); });
}

SennitBackend::WorkPointer SennitBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                          const c10d::AllgatherOptions& options) {
  return guarded([&] {
    check_pairs("all_gather_into_tensor_coalesced", outputs.size(), inputs.size());
    std::vector<Call> calls;
    for (size_t index = 0; index < inputs.size(); ++index) {
      calls.push_back(allgather_call("outputs", outputs[index], inputs[index], options));
    }
    return start_all(OpType::COALESCED, std::move(calls));
  });
}

Call SennitBackend::allgather_list_call(Tensors& outputs, at::Tensor& input,
                                        const c10d::AllgatherOptions& options) const {
  check_tensor("input", input);
  check_list("outputs", outputs, size_, input);
  const Outputs written("outputs", outputs);
  Call call =
      new_call("sennit all_gather", OpType::ALLGATHER, Collective::ALLGATHER, input, options.timeout, options.asyncOp);
  const at::Tensor& own = outputs[static_cast<size_t>(rank_)];
  check_tensor_count("outputs[this rank]", own, count_of(input), "the input's size");
  call.separate = true;
  call.in_place = input.numel() != 0 && is_same_memory(own, input);
  for (const at::Tensor& output : outputs) {
    call.counts.push_back(count_of(output));
    call.outputs.push_back(output);
  }
  call.inputs.push_back(call.in_place ? input : written.apart(input));
  return call;
}

SennitBackend::WorkPointer SennitBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  return guarded([&] {
    TORCH_CHECK_VALUE(inputs.size() == 1 && outputs.size() == 1, "all_gather has ", inputs.size(), " inputs and ",
                      outputs.size(), " output lists; exactly 1 of each is allowed");
    return run(allgather_list_call(outputs[0], inputs[0], options));
  });
}

SennitBackend::WorkPointer SennitBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                              const c10d::AllgatherOptions& options) {
  return guarded([&] {
    // outputs[r][i] is input i of rank r.
    TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == size_ && !inputs.empty(), "outputs has ", outputs.size(),
                      " lists and there are ", inputs.size(), " inputs; needed: a list for each of the ", size_,
                      " ranks, at least 1 input");
    for (const Tensors& list : outputs) check_pairs("all_gather_coalesced", list.size(), inputs.size());
    std::vector<Call> calls;
    for (size_t index = 0; index < inputs.size(); ++index) {
      Tensors by_rank;
      for (const Tensors& list : outputs) by_rank.push_back(list[index]);
      calls.push_back(allgather_list_call(by_rank, inputs[index], options));
    }
    return start_all(OpType::ALLGATHER_COALESCED, std::move(calls));
  });
}

SennitBackend::WorkPointer SennitBackend::gather(TensorLists& outputs, Tensors& inputs,
                                                 const c10d::GatherOptions& options) {
  return guarded([&] {
    check_single("inputs", inputs);
    check_rank("root", options.rootRank, size_);
    const at::Tensor& input = inputs[0];
    Call call = new_call("sennit gather", OpType::GATHER, Collective::GATHER, input, options.timeout, options.asyncOp);
    call.root = static_cast<uint32_t>(options.rootRank);
    call.separate = true;
    if (rank_ == options.rootRank) {
      TORCH_CHECK_VALUE(outputs.size() == 1, "outputs has ", outputs.size(), " lists; the root needs exactly 1");
      check_list("outputs", outputs[0], size_, input);
      check_tensor_count("outputs[this rank]", outputs[0][static_cast<size_t>(rank_)], count_of(input),
                         "the input's size");
      call.inputs.push_back(Outputs("outputs", outputs[0]).apart(input));
      for (const at::Tensor& output : outputs[0]) {
        call.counts.push_back(count_of(output));
        call.outputs.push_back(output);
      }
    } else {
      TORCH_CHECK_VALUE(outputs.empty(), "outputs has ", outputs.size(), " lists; only the root (rank ",
                        options.rootRank, ") may pass any");
      call.inputs.push_back(input);
      call.counts.append(static_cast<size_t>(size_), count_of(input));
    }
    return run(std::move(call));
  });
}

SennitBackend::WorkPointer SennitBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                                  const c10d::ScatterOptions& options) {
  return guarded([&] {
    check_single("outputs", outputs);
    check_rank("root", options.rootRank, size_);
    const at::Tensor& output = outputs[0];
    const Outputs written("output", output);
    Call call =
        new_call("sennit scatter", OpType::SCATTER, Collective::SCATTER, output, options.timeout, options.asyncOp);
    call.root = static_cast<uint32_t>(options.rootRank);
    call.separate = true;
    call.outputs.push_back(output);
    if (rank_ == options.rootRank) {
      TORCH_CHECK_VALUE(inputs.size() == 1, "inputs has ", inputs.size(), " lists; the root needs exactly 1");
      check_list("inputs", inputs[0], size_, output);
      check_tensor_count("inputs[this rank]", inputs[0][static_cast<size_t>(rank_)], count_of(output),
                         "the output's size");
      for (const at::Tensor& input : inputs[0]) {
        call.counts.push_back(count_of(input));
        call.inputs.push_back(written.apart(input));
      }
    } else {
      TORCH_CHECK_VALUE(inputs.empty(), "inputs has ", inputs.size(), " lists; only the root (rank ", options.rootRank,
                        ") may pass any");
      call.counts.append(static_cast<size_t>(size_), count_of(output));
    }
    return run(std::move(call));
  });
}

SennitBackend::WorkPointer SennitBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                         const c10d::ReduceScatterOptions& options) {
  return guarded([&] {
    check_single("outputs", outputs);
    TORCH_CHECK_VALUE(inputs.size() == 1, "inputs has ", inputs.size(), " lists; exactly 1 is allowed");
    const at::Tensor& output = outputs[0];
    check_list("inputs", inputs[0], size_, output);
    const Outputs written("output", output);
    Call call = new_call("sennit reduce_scatter", OpType::REDUCE_SCATTER, Collective::REDUCE_SCATTER, output,
                         options.timeout, options.asyncOp);
    call.set_reduce(options.reduceOp, output.scalar_type());
    call.separate = true;
    const at::Tensor& own = inputs[0][static_cast<size_t>(rank_)];
    check_tensor_count("output", output, count_of(own), "the size of inputs[this rank]");
    for (const at::Tensor& input : inputs[0]) {
      const bool in_place = is_same_memory(output, own) && is_same_memory(input, own);
      call.counts.push_back(count_of(input));
      call.inputs.push_back(in_place ? input : written.apart(input));
    }
    call.outputs.push_back(output);
    return run(std::move(call));
  });
}

Call SennitBackend::reduce_scatter_call(at::Tensor& output, at::Tensor& input,
                                        const c10d::ReduceScatterOptions& options) const {
  check_tensor("output", output);
  check_tensor("input", input);
  check_same_type("input", input, output);
  const uint64_t count = count_of(output);
  check_tensor_count("input", input, count * static_cast<uint64_t>(size_),
                     c10::str(size_, " ranks times the output's ", count));
  const Outputs written("output", output);
  Call call = new_call("sennit reduce_scatter", OpType::_REDUCE_SCATTER_BASE, Collective::REDUCE_SCATTER, output,
                       options.timeout, options.asyncOp);
  call.set_reduce(options.reduceOp, output.scalar_type());
  call.counts.append(static_cast<size_t>(size_), count);
  call.inputs.push_back(is_part(output, input, rank_) ? input : written.apart(input));
  call.outputs.push_back(output);
  return call;
}

SennitBackend::WorkPointer SennitBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                               const c10d::ReduceScatterOptions& options) {
  return guarded([&] { return run(reduce_scatter_call(output, input, options)); });
}

SennitBackend::WorkPointer SennitBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                          const c10d::ReduceScatterOptions& options) {
  return guarded([&] {
    check_pairs("reduce_scatter_tensor_coalesced", outputs.size(), inputs.size());
    std::vector<Call> calls;
    for (size_t index = 0; index < inputs.size(); ++index) {
      calls.push_back(reduce_scatter_call(outputs[index], inputs[index], options));
    }
    return start_all(REDUCE_SCATTER_TENSOR_COALESCED, std::move(calls));
  });
}

SennitBackend::WorkPointer SennitBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                        std::vector<int64_t>& output_splits,
                                                        std::vector<int64_t>& input_splits,
                                                        const c10d::AllToAllOptions& options) {
  return guarded([&] {
    check_tensor("output", output);
    check_tensor("input", input);
    check_same_type("output", output, input);
    check_splits("output_split_sizes", output_splits, output, size_);
    check_splits("input_split_sizes", input_splits, input, size_);
    const Outputs written("output", output);
    Call call = new_call("sennit all_to_all", OpType::ALLTOALL_BASE, Collective::ALLTOALL, input, options.timeout,
                         options.asyncOp);
    const auto add_counts = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits) {
      if (splits.empty()) {
        call.counts.append(static_cast<size_t>(size_), count_of(tensor) / static_cast<uint64_t>(size_));
        return;
      }
      const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
      const uint64_t row = rows == 0 ? 0 : count_of(tensor) / static_cast<uint64_t>(rows);
      for (const int64_t split : splits) call.counts.push_back(static_cast<uint64_t>(split) * row);
    };
    call.equal_parts = input_splits.empty() && output_splits.empty();
    add_counts(input, input_splits);
    add_counts(output, output_splits);
    const auto own = static_cast<size_t>(rank_);
    TORCH_CHECK_VALUE(call.counts[own] == call.counts[own + static_cast<size_t>(size_)], "rank ", rank_,
                      " sends itself ", call.counts[own], " elements but expects ",
                      call.counts[own + static_cast<size_t>(size_)], "; entry ", rank_,
                      " of input_split_sizes and output_split_sizes must mean the same size");
    call.inputs.push_back(written.apart(input));
    call.outputs.push_back(output);
    return run(std::move(call));
  });
}

SennitBackend::WorkPointer SennitBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                                   const c10d::AllToAllOptions& options) {
  return guarded([&] {
    TORCH_CHECK_VALUE(!inputs.empty(), "inputs is empty; one tensor for each of the ", size_, " ranks is needed");
    check_list("inputs", inputs, size_, inputs[0]);
    check_list("outputs", outputs, size_, inputs[0]);
    const Outputs written("outputs", outputs);
    Call call = new_call("sennit all_to_all", OpType::ALLTOALL, Collective::ALLTOALL, inputs[0], options.timeout,
                         options.asyncOp);
    call.separate = true;
    const auto own = static_cast<size_t>(rank_);
    check_tensor_count("outputs[this rank]", outputs[own], count_of(inputs[own]), "the size of inputs[this rank]");
    for (const at::Tensor& input : inputs) {
      call.counts.push_back(count_of(input));
      call.inputs.push_back(written.apart(input));
    }
    for (const at::Tensor& output : outputs) {
      call.counts.push_back(count_of(output));
      call.outputs.push_back(output);
    }
    return run(std::move(call));
  });
}

SennitBackend::WorkPointer SennitBackend::point_to_point(const char* title, OpType type, Tensors& tensors,
                                                         uint32_t peer, int tag, bool is_send) {
  return guarded([&] {
    check_single("tensors", tensors);
    TORCH_CHECK_VALUE(tag >= 0, "tag is ", tag, "; allowed: 0 to 2147483647");
    if (peer != SENNIT_ANY_PEER) {
      check_rank("peer", static_cast<int32_t>(peer), size_);
      TORCH_CHECK_VALUE(static_cast<int>(peer) != rank_, "peer is ", peer,
                        ", this rank itself; allowed: the others of 0 to ", size_ - 1);
    }
    if (!is_send) Outputs("tensor", tensors[0]);
    Call call = new_call(title, type, Collective::P2P, tensors[0], c10d::kUnsetTimeout, true);
    call.root = peer;
    call.is_send = is_send;
    call.options.tag = static_cast<uint32_t>(tag);
    call.counts.push_back(count_of(tensors[0]));
    call.outputs.push_back(tensors[0]);
    return run(std::move(call));
  });
}

SennitBackend::WorkPointer SennitBackend::send(Tensors& tensors, int peer, int tag) {
  return point_to_point("sennit send", OpType::SEND, tensors, static_cast<uint32_t>(peer), tag, true);
}

SennitBackend::WorkPointer SennitBackend::recv(Tensors& tensors, int peer, int tag) {
  TORCH_CHECK_VALUE(peer >= 0, "peer is ", peer, "; allowed: 0 to ", size_ - 1);
  return point_to_point("sennit recv", OpType::RECV, tensors, static_cast<uint32_t>(peer), tag, false);
}

SennitBackend::WorkPointer SennitBackend::recvAnysource(Tensors& tensors, int tag) {
  return point_to_point("sennit recv from any rank", OpType::RECVANYSOURCE, tensors, SENNIT_ANY_PEER, tag, false);
}

SennitBackend::WorkPointer SennitBackend::barrier(const c10d::BarrierOptions& options) {
  return guarded([&] {
    Call call;
    call.title = "sennit barrier";
    call.type = OpType::BARRIER;
    call.options.timeout_us = options.timeout.count() > 0 ? to_us(options.timeout) : 0;
    call.options.async = options.asyncOp;
    return run(std::move(call));
  });
}

}  // namespace sennit::runtime
