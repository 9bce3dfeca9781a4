// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace sennit::kernels {

// Runs of keys and folds of products, for Python.
void bind_products(nanobind::module_& module);

}  // namespace sennit::kernels
