// SPDX-License-Identifier: Apache-2.0
#include "bindings.hpp"

NB_MODULE(_native, module) {
  sennit::offload::bind_permutation(module);
  sennit::offload::bind_program(module);
  sennit::offload::bind_receiver(module);
  sennit::offload::bind_records(module);
  sennit::offload::bind_slots(module);
  sennit::offload::bind_tracepoints(module);
}
