// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace sennit::bindings {

// Adds begin, read and end of executor/operation_log.hpp to the module, and the names of groups; and lent_time.hpp.
void bind_operation_log(nanobind::module_& module);

}  // namespace sennit::bindings
