// SPDX-License-Identifier: Apache-2.0
// What the extension takes of torch that torch does not promise to keep: headers below torch/csrc, and numbers that are
// written in torch's Python alone. A new minor release of torch is tried here first, and in torch_versions.py. All
// other files include this one, ATen and c10.
#pragma once

#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

// The virtual functions of c10d::Backend that SennitBackend overrides are in all of these; `override` finds the others.
static_assert(TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11),
              "sennit's extension needs torch 2.11 or later");
#define SENNIT_TORCH_BEFORE(minor) (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < (minor))

namespace sennit::runtime {

// The factor of PREMUL_SUM. Torch 2.13 gave it another name.
#if SENNIT_TORCH_BEFORE(13)
using PreMulSumSupplement = c10d::NCCLPreMulSumSupplement;
#else
using PreMulSumSupplement = c10d::PreMulSumSupplement;
#endif

// Torch 2.12 tells these reductions from others that are coalesced.
#if SENNIT_TORCH_BEFORE(12)
constexpr auto REDUCE_SCATTER_TENSOR_COALESCED = c10d::OpType::COALESCED;
#else
constexpr auto REDUCE_SCATTER_TENSOR_COALESCED = c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#endif

// torch.distributed.distributed_c10d: end what is in flight before the group becomes smaller.
constexpr int SHRINK_ABORT = 1;

}  // namespace sennit::runtime
