// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <nanobind/nanobind.h>

void bind_fabric(nanobind::module_& m);
