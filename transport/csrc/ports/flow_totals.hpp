// SPDX-License-Identifier: Apache-2.0
// The counters of a port's flows together.
#pragma once

#include "flow/flow.hpp"
#include "telemetry/counter_list.hpp"

namespace sennit {

// Adds counts; of times and windows the largest is kept.
void add_to_totals(flow::FlowCounters& totals, const flow::FlowCounters& one);
// All but the refusals, which a port counts together with its own.
void append_totals(CounterList& out, const flow::FlowCounters& totals);

}  // namespace sennit
