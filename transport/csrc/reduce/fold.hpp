// SPDX-License-Identifier: Apache-2.0
// fold: the arithmetic of reductions. Operands are combined as a postfix program says, always left with right, so that
// a result depends on its inputs and the tree alone (docs/reference/plans.md rule 1).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sennit/core.h"

namespace sennit {

// The most values a program may keep at a time. The canonical tree over n leaves keeps 1 + log2(n).
inline constexpr uint32_t MAX_FOLD_DEPTH = 33;

struct FoldSource {
  const void* data;
  uint32_t combinations;  // of the two topmost values, after this one was pushed
  bool is_partial;        // in the accumulator's type, and not scaled again
};

struct FoldArguments {
  void* destination;
  std::span<const FoldSource> sources;  // a program that leaves one value
  uint64_t count;                       // elements
  uint32_t divisor;                     // of SENNIT_AVG
  double scalar;                        // factor of SENNIT_PREMUL_SUM, applied to every source that is no partial sum
  bool gives_partial;                   // the result is a partial sum: not divided, not rounded
};

using FoldKernel = void (*)(const FoldArguments&);

// Null if the type has no such operation (bitwise on floats, order on complex numbers, mean of bools).
FoldKernel find_fold(sennit_dtype dtype, sennit_reduce reduce);

uint32_t element_size_bytes(sennit_dtype dtype);

// The type of partial sums.
constexpr sennit_dtype accumulator(sennit_dtype dtype) {
  if (dtype == SENNIT_F16 || dtype == SENNIT_BF16) return SENNIT_F32;
  return dtype == SENNIT_C32 ? SENNIT_C64 : dtype;
}

}  // namespace sennit
