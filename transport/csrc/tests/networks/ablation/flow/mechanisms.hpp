// SPDX-License-Identifier: Apache-2.0
// Only recovery_ablation finds this file before flow/mechanisms.hpp: one mechanism of a thread may be off.
#pragma once
#include <optional>

#include "flow/mechanism_names.hpp"

namespace sennit::flow {

inline thread_local std::optional<Mechanism> switched_off;
inline bool uses(Mechanism mechanism) { return switched_off != mechanism; }

}  // namespace sennit::flow
