// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace sennit::bindings {

// Adds the functions of codec/codec.hpp to the module. They take buffers, and release the GIL while they run.
void bind_codecs(nanobind::module_& module);

}  // namespace sennit::bindings
