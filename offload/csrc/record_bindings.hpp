// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace sennit::offload {

// RecordColumns and RecordSender.
void bind_records(nanobind::module_& module);

}  // namespace sennit::offload
