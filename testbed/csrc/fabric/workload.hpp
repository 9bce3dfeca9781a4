// SPDX-License-Identifier: Apache-2.0
// What the hosts exchange: the schedules of the executor's plans, and two patterns that stress a fabric.
//
//   alltoall          host r receives from r - 1, r - 2, ..., a few pairs at a time (algorithms/alltoall.py)
//   allreduce_direct  every host folds its share of the vector and sends it back to all (algorithms/allreduce.py)
//   allreduce_ring    2 (n - 1) steps to the next host, each waiting for the one before (Patarasu and Yuan, 2009)
//   permutation       host r to host r + n / 2: no two pairs need to share a link
//   incast            all hosts to host 0 at once
#pragma once
#include <memory>
#include <vector>

#include "fabric/config.hpp"
#include "fabric/exchange.hpp"

namespace sennit::fabric {

// Throws std::invalid_argument for a configuration out of range.
std::unique_ptr<Workload> make_workload(const WorkloadConfig& config, uint32_t hosts, uint64_t seed);

// Returns the payload bytes from host `from` to host `to` over the whole workload. The ideal is computed from them.
uint64_t pair_bytes(const WorkloadConfig& config, uint32_t hosts, uint32_t from, uint32_t to);

}  // namespace sennit::fabric
