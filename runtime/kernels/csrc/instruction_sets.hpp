// SPDX-License-Identifier: Apache-2.0
// The kernels of each instruction set, and which of them this processor can run.
#pragma once

#include <span>
#include <string_view>

#include "job.hpp"

namespace sennit::kernels {

// The instruction sets that this processor has, fastest first. "portable" is always one of them.
std::span<const Kernels* const> available_kernels();

// Null if this processor does not have this set.
const Kernels* find_kernels(std::string_view name);

}  // namespace sennit::kernels
