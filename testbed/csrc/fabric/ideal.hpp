// SPDX-License-Identifier: Apache-2.0
// The least time in which any transport can finish: bytes over the links that must carry them, plus propagation.
#pragma once
#include <cstdint>
#include <deque>
#include <span>

#include "fabric/config.hpp"
#include "fabric/rank.hpp"
#include "fabric/topology.hpp"

namespace sennit::fabric {

// The largest value over all cuts: payload bytes of the plans that must cross the cut / rate of its living links, plus
// the propagation of the longest path. Cuts: a host's own link, the links between a leaf and its spines, the links
// between a pod and the cores, each in both directions. `failed` cables count until `failure.at_us`. Headers,
// acknowledgements and the rendezvous are left out, because they are the transport's cost.
double ideal_us(const SimulationConfig& config, const Topology& topology, std::span<const uint32_t> failed,
                const std::deque<Rank>& ranks);

}  // namespace sennit::fabric
