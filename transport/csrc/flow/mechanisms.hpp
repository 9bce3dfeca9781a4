// SPDX-License-Identifier: Apache-2.0
// The parts of loss recovery, by name. Here each of them is on, always. The program that asks what each one earns
// (docs/lab/recovery.md) is compiled with a file of its own in place of this one, where one may be off.
#pragma once
#include <cstdint>

#include "flow/mechanism_names.hpp"

namespace sennit::flow {

constexpr bool uses(Mechanism) { return true; }

}  // namespace sennit::flow
