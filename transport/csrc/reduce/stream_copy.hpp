// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace sennit {

// Copies without reading the destination's cache lines or filling the cache. For large results that nobody reads soon:
// 32 MiB out of a shared ring took 2.5 ms instead of 3.2 ms. Ranges must not overlap.
void stream_copy(void* destination, const void* source, size_t size_bytes);

}  // namespace sennit
