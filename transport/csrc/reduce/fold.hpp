// SPDX-License-Identifier: Apache-2.0
// fold: the arithmetic of reductions. dst[i] = op(op(source0[i], source1[i]), …), always from the left, so that a
// result depends only on its inputs (docs/reference/plans.md rule 1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sennit/core.h"

namespace sennit {

struct FoldArguments {
  void* destination;
  const void* const* sources;
  uint32_t source_count;  // >= 1
  uint64_t count;         // elements
  uint32_t world;         // divisor of SENNIT_AVG
  double scalar;          // factor of SENNIT_PREMUL_SUM, applied to every source
};

using FoldKernel = void (*)(const FoldArguments&);

// Null if the type has no such operation (bitwise on floats, order on complex numbers, mean of bools).
FoldKernel find_fold(sennit_dtype dtype, sennit_reduce reduce);

uint32_t element_size_bytes(sennit_dtype dtype);

}  // namespace sennit
