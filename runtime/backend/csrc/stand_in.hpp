// SPDX-License-Identifier: Apache-2.0
// Host tensors in the part of an accelerator's, for tests where there is none. Nothing else uses this.
#pragma once

#include <cstdint>

namespace sennit::runtime::stand_in {

// While active, calls of this thread on host tensors are treated as calls on device tensors. Returns what it was.
bool set_active(bool active);
bool is_active();

// Every copy of the stand-in first yields the processor between 0 and `max_yields` times, drawn from `seed`.
void delay_copies(uint64_t seed, uint32_t max_yields);
void delay();

}  // namespace sennit::runtime::stand_in
