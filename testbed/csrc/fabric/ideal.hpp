// SPDX-License-Identifier: Apache-2.0
// The time below which no transport can finish: bytes over links that must carry them, and propagation.
#pragma once
#include <cstdint>
#include <span>

#include "fabric/config.hpp"
#include "fabric/topology.hpp"

namespace sennit::fabric {

// The largest over all cuts of: payload bytes that must cross it / what its living links carry, plus the propagation
// of the longest path. Cuts: a host's own link, the links between a leaf and its spines, those between a pod and the
// cores, each in both directions. `failed` cables count until `failure.at_us`. Headers, acknowledgements and the
// rendezvous are not in it: they are the transport's cost.
double ideal_us(const SimulationConfig& config, const Topology& topology, std::span<const uint32_t> failed);

}  // namespace sennit::fabric
