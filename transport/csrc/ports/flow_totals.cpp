// SPDX-License-Identifier: Apache-2.0
#include "ports/flow_totals.hpp"

#include <algorithm>

namespace sennit {

using Kind = flow::FlowCounters::Kind;

void add_to_totals(flow::FlowCounters& totals, const flow::FlowCounters& one) {
  for (const auto& [name, value, kind] : flow::FlowCounters::fields())
    totals.*value = kind == Kind::gauge ? std::max(totals.*value, one.*value) : totals.*value + one.*value;
}

void append_totals(CounterList& out, const flow::FlowCounters& totals) {
  for (const auto& [name, value, kind] : flow::FlowCounters::fields())
    if (kind != Kind::refusal) out.emplace_back(name, totals.*value);
}

}  // namespace sennit
