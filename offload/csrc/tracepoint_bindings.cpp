// SPDX-License-Identifier: Apache-2.0
// Tracepoints that Python fires.
#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "tracepoints.hpp"

namespace nb = nanobind;

namespace sennit::offload {

void bind_tracepoints(nb::module_& module) {
  module.def("trace_batch_begun", &trace::batch_begun, nb::arg("rank"), nb::arg("batch"));
  module.def("trace_batch_complete", &trace::batch_complete, nb::arg("rank"), nb::arg("batch"), nb::arg("rows"));
  module.def("trace_batch_wanted", &trace::batch_wanted, nb::arg("rank"), nb::arg("batch"));
  module.def("trace_batch_taken", &trace::batch_taken, nb::arg("rank"), nb::arg("batch"));
  module.def("trace_batch_released", &trace::batch_released, nb::arg("rank"), nb::arg("batch"));
  module.def("trace_rows_requested", &trace::rows_requested, nb::arg("rank"), nb::arg("batch"), nb::arg("row"),
             nb::arg("why"));
}

}  // namespace sennit::offload
