// SPDX-License-Identifier: Apache-2.0
// Compiled once for each instruction set: SENNIT_ISA is its name, and the namespace of everything in the headers.
#include "convert.hpp"
#include "lookup.hpp"
#include "update.hpp"

#define SENNIT_TEXT_OF(name) #name
#define SENNIT_TEXT(name) SENNIT_TEXT_OF(name)

namespace sennit::kernels::SENNIT_ISA {

extern const Kernels kernels;
const Kernels kernels{SENNIT_TEXT(SENNIT_ISA), lookup, weight_gradient, update, sum, in_range, narrow_row, widen_row};

}  // namespace sennit::kernels::SENNIT_ISA
