// SPDX-License-Identifier: Apache-2.0
// Treats host tensors as device tensors, for tests without an accelerator. Nothing else uses this.
#pragma once

#include <cstdint>

namespace sennit::runtime::stand_in {

// While active, calls of this thread treat host tensors as device tensors. Returns the previous value.
bool set_active(bool active);
bool is_active();

// Before every second copy, the stand-in sleeps up to `max_us`, below a second. Which, and how long, is drawn from
// `seed`.
void delay_copies(uint64_t seed, uint32_t max_us);
void delay();

}  // namespace sennit::runtime::stand_in
