// SPDX-License-Identifier: Apache-2.0
// What the backend needs from the Python interpreter: to release its lock while waiting, and Ctrl-C.
#pragma once

#include <pybind11/pybind11.h>

namespace sennit::runtime {

inline bool interpreter_is_usable() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

inline bool holds_gil() { return interpreter_is_usable() && PyGILState_Check() != 0; }

// Releases the GIL during its lifetime if this thread holds it. c10d's own bindings have released it already.
// Destructors and calls from other C++ code have not, and the threads that finish operations need it.
class WithoutGil {
 public:
  WithoutGil() {
    if (holds_gil()) saved_ = PyEval_SaveThread();
  }
  ~WithoutGil() {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* saved_ = nullptr;
};

// Raises KeyboardInterrupt, or what a signal handler raised, as a C++ exception. Python runs handlers in its main
// thread only, so in other threads this is a cheap no-op.
inline void check_signals() {
  if (!interpreter_is_usable()) return;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace sennit::runtime
