// SPDX-License-Identifier: Apache-2.0
// The core's errors as exceptions of sennit.transport.errors.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>
#include <system_error>

#include "sennit/core.h"

namespace sennit::bindings {

namespace nb = nanobind;

[[noreturn]] inline void raise_status(sennit_status status, const std::string& message, int error_number = 0) {
  const nb::object error = nb::module_::import_("sennit.transport.errors")
                               .attr("from_status")(static_cast<int>(status), message, error_number);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

// Set-up failures: an errno becomes a DeviceError that has it, a wrong argument an ArgumentError.
template <class Body>
auto guarded(Body body) {
  try {
    return body();
  } catch (const std::system_error& failure) {
    raise_status(SENNIT_DEVICE, failure.what(), failure.code().value());
  } catch (const std::invalid_argument& failure) {
    raise_status(SENNIT_ARGUMENT, failure.what());
  } catch (const std::runtime_error& failure) {
    raise_status(SENNIT_DEVICE, failure.what());
  }
}

}  // namespace sennit::bindings
