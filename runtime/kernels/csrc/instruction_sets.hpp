// SPDX-License-Identifier: Apache-2.0
// The kernels of each instruction set, and which of them this processor can run.
#pragma once

#include <span>
#include <string_view>

#include "job.hpp"

namespace sennit::kernels {

// The sets that this processor has, the fastest first; "portable" is always there.
std::span<const Kernels* const> available_kernels();

// Null if this processor does not have the set of that name.
const Kernels* find_kernels(std::string_view name);

}  // namespace sennit::kernels
