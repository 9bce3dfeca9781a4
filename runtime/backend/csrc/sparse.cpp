// SPDX-License-Identifier: Apache-2.0
// AllReduce of sparse COO tensors: every rank gathers the indices and values of all ranks, and sums them.
//
// Sizes differ between ranks, so a first AllGather exchanges them. The call blocks, because its three exchanges depend
// on each other. Every rank sums in rank order (a stable sort by index), so all get the same bits.
#include "arguments.hpp"
#include "backend.hpp"

namespace sennit::runtime {

c10::intrusive_ptr<c10d::Work> SennitBackend::allreduce_sparse(Tensors& tensors,
                                                               const c10d::AllreduceOptions& options) {
  TORCH_CHECK_VALUE(tensors.size() == 1 && tensors[0].is_sparse(), "tensors has ", tensors.size(),
                    " tensors; exactly 1 sparse COO tensor is allowed");
  const auto op = options.reduceOp.op_;
  TORCH_CHECK_VALUE(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG,
                    "a sparse all_reduce allows the reduce ops SUM and AVG only");
  checked_reduce(options.reduceOp, tensors[0].scalar_type());
  const at::NoGradGuard no_grad;
  const at::Tensor own = tensors[0].coalesce();
  at::Tensor indices = own.indices().t().contiguous();  // one row an entry
  at::Tensor values = own.values().contiguous();

  c10d::AllgatherOptions gather_options;
  gather_options.timeout = options.timeout;
  gather_options.asyncOp = false;
  at::Tensor entries = at::empty({size_}, indices.options().device(at::kCPU));
  at::Tensor own_entries = at::full({1}, own._nnz(), entries.options());
  _allgather_base(entries, own_entries, gather_options)->wait(kNoTimeout);

  const auto gather_rows = [&](at::Tensor& rows) {
    Tensors all;
    for (int64_t rank = 0; rank < size_; ++rank) {
      std::vector<int64_t> sizes = rows.sizes().vec();
      sizes[0] = entries[rank].item<int64_t>();
      all.push_back(at::empty(sizes, rows.options()));
    }
    start(allgather_list_call(all, rows, gather_options))->wait(kNoTimeout);
    return at::cat(all, 0);
  };
  const at::Tensor all_indices = gather_rows(indices).t();
  const at::Tensor all_values = gather_rows(values);
  at::Tensor sum = at::sparse_coo_tensor(all_indices, all_values, own.sizes(), own.options()).coalesce();
  if (op == c10d::ReduceOp::AVG) sum.div_(size_);
  tensors[0].copy_(sum);
  return c10::make_intrusive<JointWork>(rank_, c10d::OpType::_ALLREDUCE_SPARSE, std::vector<WorkPointer>{}, tensors);
}

}  // namespace sennit::runtime
