// SPDX-License-Identifier: Apache-2.0
// New CPU tensors in symmetric memory (sennit_symmetric_alloc), which the other ranks of this host map.
#pragma once

namespace sennit::runtime::symmetric {

// Whether every new CPU tensor of the process, in all threads, is symmetric.
void set_everywhere(bool on);
// Whether new CPU tensors of the calling thread are. Calls nest.
void begin();
void end();
// Whether the range lies in symmetric memory of this process.
bool contains(const void* data);

}  // namespace sennit::runtime::symmetric
