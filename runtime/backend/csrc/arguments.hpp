// SPDX-License-Identifier: Apache-2.0
// Checks the arguments of every collective before anything is sent.
//
// Messages name the argument, its value and what is allowed (ValueError or TypeError in Python).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "sennit/core.h"
#include "torch_versions.hpp"

namespace sennit::runtime {

// The core's element type, or 0x80 + torch's number for types that can only be moved (fp8, fp4, bits).
uint8_t type_code(at::ScalarType type);

uint64_t data_bytes(const at::Tensor& tensor);

// Checks that a tensor has strides, is resolved and holds data. `what` names the argument, `index` its place in a list.
void check_tensor(std::string_view what, const at::Tensor& tensor, int64_t index = -1);
// Returns the only tensor in `tensors`, checked.
void check_single(std::string_view what, const std::vector<at::Tensor>& tensors);
// Checks that there are `world` tensors of the type and device of `like`.
void check_list(std::string_view what, const std::vector<at::Tensor>& tensors, int64_t world, const at::Tensor& like);
void check_same_type(std::string_view what, const at::Tensor& tensor, const at::Tensor& like);
void check_rank(std::string_view what, int64_t rank, int64_t world);
// Checks one split per rank: none negative, and their sum is the first dimension of `tensor`. Empty: an even split.
void check_splits(std::string_view what, const std::vector<int64_t>& splits, const at::Tensor& tensor, int64_t world);

// The sennit_reduce of `op`. Raises if `op` is not defined for `type`.
sennit_reduce checked_reduce(const c10d::ReduceOp& op, at::ScalarType type);
// The factor of PREMUL_SUM; none for other operations. Raises if numbers of `type` cannot be multiplied by it.
std::optional<double> premul_factor(const c10d::ReduceOp& op, at::ScalarType type);

}  // namespace sennit::runtime
