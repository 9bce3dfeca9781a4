// SPDX-License-Identifier: Apache-2.0
#include "arguments.hpp"

#include <cmath>
#include <numeric>
#include <string>

namespace sennit::runtime {
namespace {

constexpr uint8_t MOVED_ONLY = 0x80;

std::string place(std::string_view what, int64_t index) {
  std::string text(what);
  if (index >= 0) text += "[" + std::to_string(index) + "]";
  return text;
}

const char* reduce_name(uint32_t op) {
  static constexpr const char* NAMES[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return op < std::size(NAMES) ? NAMES[op] : "unknown";
}

std::string defined_reduces(uint8_t code) {
  std::string text;
  for (uint32_t op = 0; op <= SENNIT_PREMUL_SUM; ++op) {
    if (sennit_reduce_is_defined(code, op) != 0) text += (text.empty() ? "" : ", ") + std::string(reduce_name(op));
  }
  return text.empty() ? "none (this type can only be moved)" : text;
}

}  // namespace

uint8_t type_code(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return SENNIT_U8;
    case at::kChar:
      return SENNIT_I8;
    case at::kShort:
      return SENNIT_I16;
    case at::kInt:
      return SENNIT_I32;
    case at::kLong:
      return SENNIT_I64;
    case at::kHalf:
      return SENNIT_F16;
    case at::kBFloat16:
      return SENNIT_BF16;
    case at::kFloat:
      return SENNIT_F32;
    case at::kDouble:
      return SENNIT_F64;
    case at::kComplexHalf:
      return SENNIT_C32;
    case at::kComplexFloat:
      return SENNIT_C64;
    case at::kComplexDouble:
      return SENNIT_C128;
    case at::kBool:
      return SENNIT_BOOL;
    case at::kUInt16:
      return SENNIT_U16;
    case at::kUInt32:
      return SENNIT_U32;
    case at::kUInt64:
      return SENNIT_U64;
    default:
      return static_cast<uint8_t>(MOVED_ONLY + static_cast<uint8_t>(type));
  }
}

uint64_t data_bytes(const at::Tensor& tensor) { return static_cast<uint64_t>(tensor.numel()) * tensor.element_size(); }

void check_tensor(std::string_view what, const at::Tensor& tensor, int64_t index) {
  TORCH_CHECK_VALUE(tensor.defined(), place(what, index), " is undefined; a tensor is needed");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, place(what, index), " has layout ", tensor.layout(),
                    "; only dense (strided) tensors are allowed");
  const c10::DeviceType device = tensor.device().type();
  TORCH_CHECK_VALUE(device != at::kMeta, place(what, index),
                    " is on device meta and holds no data; allowed: ", "cpu or an accelerator");
  TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), place(what, index),
                    " is a lazy conjugate or negation; pass tensor.resolve_conj().resolve_neg()");
}

void check_single(std::string_view what, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, " has ", tensors.size(), " tensors; exactly 1 is allowed");
  check_tensor(what, tensors[0], 0);
}

void check_same_type(std::string_view what, const at::Tensor& tensor, const at::Tensor& like) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.scalar_type(), what, " has dtype ", tensor.scalar_type(),
                   "; allowed here: ", like.scalar_type());
  TORCH_CHECK_VALUE(tensor.device() == like.device(), what, " is on device ", tensor.device(),
                    "; allowed here: ", like.device());
}

void check_list(std::string_view what, const std::vector<at::Tensor>& tensors, int64_t world, const at::Tensor& like) {
  TORCH_CHECK_VALUE(static_cast<int64_t>(tensors.size()) == world, what, " has ", tensors.size(),
                    " tensors; one for each of the ", world, " ranks is needed");
  for (size_t index = 0; index < tensors.size(); ++index) {
    check_tensor(what, tensors[index], static_cast<int64_t>(index));
    check_same_type(place(what, static_cast<int64_t>(index)), tensors[index], like);
  }
}

void check_rank(std::string_view what, int64_t rank, int64_t world) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < world, what, " is ", rank, "; allowed: 0 to ", world - 1);
}

void check_splits(std::string_view what, const std::vector<int64_t>& splits, const at::Tensor& tensor, int64_t world) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % world == 0, what, ": the first dimension is ", rows, ", not a multiple of the ", world,
                      " ranks; pass split sizes");
    return;
  }
  TORCH_CHECK_VALUE(static_cast<int64_t>(splits.size()) == world, what, " has ", splits.size(),
                    " entries; one for each of the ", world, " ranks is needed");
  for (const int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0 && split <= rows, what, " holds ", split, "; allowed: 0 to ", rows);
  }
  const int64_t total = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  TORCH_CHECK_VALUE(total == rows, what, " adds up to ", total, "; the first dimension of the tensor is ", rows);
}

sennit_reduce checked_reduce(const c10d::ReduceOp& op, at::ScalarType type) {
  const auto number = static_cast<uint32_t>(op.op_);
  const uint8_t code = type_code(type);
  TORCH_CHECK_VALUE(sennit_reduce_is_defined(code, number) != 0, "reduce op ", reduce_name(number),
                    " is not defined for dtype ", type, "; allowed: ", defined_reduces(code));
  return static_cast<sennit_reduce>(number);
}

std::optional<double> premul_factor(const c10d::ReduceOp& op, at::ScalarType type) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return std::nullopt;
  const auto* supplement = dynamic_cast<const PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, "ReduceOp PREMUL_SUM carries no factor");
  const double factor =
      supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
  TORCH_CHECK_VALUE(!at::isIntegralType(type, true) || (std::trunc(factor) == factor && std::abs(factor) < 0x1p63),
                    "the factor ", factor, " of PREMUL_SUM with dtype ", type,
                    "; allowed: whole numbers between -2^63 and 2^63");
  return factor;
}

}  // namespace sennit::runtime
