// SPDX-License-Identifier: Apache-2.0
// The extension sennit.offload._native.
#include "bindings.hpp"
#include "tracepoints.hpp"

namespace nb = nanobind;

namespace sennit::offload {
namespace {

// The tracepoints that Python fires.
void bind_tracepoints(nb::module_& module) {
  module.def("trace_batch_begun", &trace::batch_begun, nb::arg("rank"), nb::arg("batch"));
  module.def("trace_batch_complete", &trace::batch_complete, nb::arg("rank"), nb::arg("batch"), nb::arg("rows"));
  module.def("trace_batch_wanted", &trace::batch_wanted, nb::arg("rank"), nb::arg("batch"));
  module.def("trace_batch_taken", &trace::batch_taken, nb::arg("rank"), nb::arg("batch"));
  module.def("trace_batch_released", &trace::batch_released, nb::arg("rank"), nb::arg("batch"));
  module.def("trace_rows_requested", &trace::rows_requested, nb::arg("rank"), nb::arg("batch"), nb::arg("row"),
             nb::arg("why"));
}

}  // namespace
}  // namespace sennit::offload

NB_MODULE(_native, module) {
  sennit::offload::bind_encoder(module);
  sennit::offload::bind_permutation(module);
  sennit::offload::bind_program(module);
  sennit::offload::bind_receiver(module);
  sennit::offload::bind_records(module);
  sennit::offload::bind_slots(module);
  sennit::offload::bind_text(module);
  sennit::offload::bind_tracepoints(module);
}
