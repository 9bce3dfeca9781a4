// SPDX-License-Identifier: Apache-2.0
// Treats host tensors as device tensors, for tests without an accelerator. Nothing else uses this.
#pragma once

#include <cstdint>

namespace sennit::runtime::stand_in {

// While active, calls of this thread treat host tensors as device tensors. Returns the previous value.
bool set_active(bool active);
bool is_active();

// Before each copy, the stand-in yields the processor 0 to `max_yields` times, a number drawn from `seed`.
void delay_copies(uint64_t seed, uint32_t max_yields);
void delay();

}  // namespace sennit::runtime::stand_in
