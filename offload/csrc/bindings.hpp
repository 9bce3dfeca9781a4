// SPDX-License-Identifier: Apache-2.0
// The parts of the extension sennit.offload._native.
#pragma once

#include <nanobind/nanobind.h>

namespace sennit::offload {

void bind_encoder(nanobind::module_& module);      // columns of Arrow as samples, and samples as batches
void bind_permutation(nanobind::module_& module);  // permute
void bind_program(nanobind::module_& module);      // Program
void bind_receiver(nanobind::module_& module);     // Receiver, SocketReader and their arguments
void bind_records(nanobind::module_& module);      // RecordColumns and RecordSender
void bind_slots(nanobind::module_& module);        // the slots of a ring in an arena
void bind_text(nanobind::module_& module);         // LineParser

}  // namespace sennit::offload
