// SPDX-License-Identifier: Apache-2.0
// AllReduce of sparse COO tensors: every rank gathers the indices and values of all ranks, and sums them.
//
// Sizes differ between ranks, so a first AllGather exchanges them. The call blocks, because its three exchanges depend
// on each other. Ranks are summed over the tree of docs/reference/plans.md, in the accumulator's type, so all get the
// same bits.
#include <bit>

#include "arguments.hpp"
#include "backend.hpp"

namespace sennit::runtime {
namespace {

at::ScalarType accumulator(at::ScalarType type) {
  if (type == at::kHalf || type == at::kBFloat16) return at::kFloat;
  return type == at::kComplexHalf ? at::kComplexFloat : type;
}

// A binary counter: rank r's tensor meets as many others as r has trailing ones.
at::Tensor sum_over_tree(const std::vector<at::Tensor>& by_rank) {
  std::vector<at::Tensor> stack;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    stack.push_back(by_rank[rank]);
    const int combinations = rank + 1 == by_rank.size() ? std::popcount(rank) : std::countr_one(rank);
    for (int i = 0; i < combinations; ++i) {
      const at::Tensor right = stack.back();
      stack.pop_back();
      const at::Tensor& left = stack.back();
      // An index is at most once in each: coalescing adds two values, or keeps one.
      stack.back() = at::sparse_coo_tensor(at::cat({left._indices(), right._indices()}, 1),
                                           at::cat({left._values(), right._values()}), left.sizes(), left.options())
                         .coalesce();
    }
  }
  return stack.front();
}

}  // namespace

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
    return all;
  };
  const Tensors all_indices = gather_rows(indices);
  const Tensors all_values = gather_rows(values);
  const at::ScalarType type = accumulator(own.scalar_type());
  Tensors by_rank;
  for (size_t rank = 0; rank < all_indices.size(); ++rank) {
    by_rank.push_back(
        at::sparse_coo_tensor(all_indices[rank].t(), all_values[rank].to(type), own.sizes(), own.options().dtype(type))
            .coalesce());
  }
  at::Tensor sum = sum_over_tree(by_rank);
  if (op == c10d::ReduceOp::AVG) sum.div_(size_);
  tensors[0].copy_(sum.to(own.scalar_type()));
  return c10::make_intrusive<JointWork>(rank_, c10d::OpType::_ALLREDUCE_SPARSE, std::vector<WorkPointer>{}, tensors);
}

}  // namespace sennit::runtime
