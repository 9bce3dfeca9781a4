// SPDX-License-Identifier: Apache-2.0
// What a caller may pass: every check that a collective makes before anything is sent.
//
// Messages name the argument, its value and what is allowed (ValueError or TypeError in Python).
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string_view>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "sennit/core.h"

namespace sennit::runtime {

// The core's element type, or 0x80 + torch's number for types that are only moved (fp8, fp4, bits).
uint8_t type_code(at::ScalarType type);

uint64_t data_bytes(const at::Tensor& tensor);

// Dense, contiguous, resolved, on `device_type`'s memory; `what` names the argument and `index` its place.
void check_tensor(std::string_view what, const at::Tensor& tensor, int64_t index = -1);
// One tensor in `tensors`, checked.
void check_single(std::string_view what, const std::vector<at::Tensor>& tensors);
// Exactly `world` tensors of the type and device of `like`, each checked.
void check_list(std::string_view what, const std::vector<at::Tensor>& tensors, int64_t world, const at::Tensor& like);
void check_same_type(std::string_view what, const at::Tensor& tensor, const at::Tensor& like);
void check_rank(std::string_view what, int64_t rank, int64_t world);
// Ranges that share bytes although they are not the same range are an error.
void check_no_overlap(std::string_view what, const at::Tensor& output, const at::Tensor& input);
// One split for each rank, none negative, adding up to the first dimension of `tensor`. Empty: an even split.
void check_splits(std::string_view what, const std::vector<int64_t>& splits, const at::Tensor& tensor, int64_t world);

// Which of sennit_reduce `op` is; raises where it means nothing for `type`.
sennit_reduce checked_reduce(const c10d::ReduceOp& op, at::ScalarType type);
// The factor of PREMUL_SUM, 1 for all others.
double premul_factor(const c10d::ReduceOp& op);

}  // namespace sennit::runtime
