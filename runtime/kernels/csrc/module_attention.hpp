// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace sennit::kernels {

// attend and differentiate.
void bind_attention(nanobind::module_& module);

}  // namespace sennit::kernels
