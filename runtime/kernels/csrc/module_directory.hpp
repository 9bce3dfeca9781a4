// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace sennit::kernels {

// Ids of dynamic tables, for Python.
void bind_directory(nanobind::module_& module);

}  // namespace sennit::kernels
