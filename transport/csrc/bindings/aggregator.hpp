// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace sennit::bindings {

// Adds the class of aggregation/server.hpp to the module.
void bind_aggregator(nanobind::module_& module);

}  // namespace sennit::bindings
