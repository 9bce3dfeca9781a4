// SPDX-License-Identifier: Apache-2.0
// The kernels of each instruction set, and which of them this processor runs.
#pragma once

#include <span>
#include <string_view>

#include "job.hpp"

namespace sennit::kernels {

// Those that this processor has, the fastest first; "portable" is always there.
std::span<const Kernels* const> available_kernels();

// Null where this processor has none of that name.
const Kernels* find_kernels(std::string_view name);

}  // namespace sennit::kernels
