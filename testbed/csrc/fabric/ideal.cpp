// SPDX-License-Identifier: Apache-2.0
#include "fabric/ideal.hpp"

#include <algorithm>
#include <vector>

namespace sennit::fabric {
namespace {

struct Cut {
  double out_bytes = 0, in_bytes = 0;
  uint32_t cables = 0, failed = 0;
};

// The time that a cut needs for its bytes if some of its cables fail on the way.
double time_us(const Cut& cut, double bytes_per_us, double fail_at_us) {
  const double bytes = std::max(cut.out_bytes, cut.in_bytes);
  const double before = cut.cables * bytes_per_us;
  if (cut.failed == 0 || bytes <= before * fail_at_us) return bytes == 0 ? 0 : bytes / before;
  return fail_at_us + (bytes - before * fail_at_us) / ((cut.cables - cut.failed) * bytes_per_us);
}

}  // namespace

double ideal_us(const SimulationConfig& config, const Topology& topology, std::span<const uint32_t> failed,
                const std::deque<Rank>& ranks) {
  std::vector<Cut> hosts(topology.host_count()), leaves(topology.leaf_count()), pods(topology.pod_count());
  for (Cut& host : hosts) host.cables = 1;
  const auto leaf_of_cable = [&](uint32_t cable) {
    return topology.links()[Topology::up_link(cable)].from - topology.host_count();
  };
  for (uint32_t cable = topology.first_fabric_cable(); cable < topology.cable_count(); ++cable) {
    const bool is_core = cable >= topology.first_core_cable();
    ++(is_core ? pods[topology.pod_of_core_cable(cable)] : leaves[leaf_of_cable(cable)]).cables;
  }
  for (const uint32_t cable : failed) {
    const bool is_core = cable >= topology.first_core_cable();
    ++(is_core ? pods[topology.pod_of_core_cable(cable)] : leaves[leaf_of_cable(cable)]).failed;
  }
  for (uint32_t from = 0; from < ranks.size(); ++from)
    for (const auto& [to, sent] : ranks[from].sent()) {
      const auto bytes = static_cast<double>(sent.bytes);
      const uint32_t from_leaf = topology.leaf_of(from), to_leaf = topology.leaf_of(to);
      hosts[from].out_bytes += bytes;
      hosts[to].in_bytes += bytes;
      if (from_leaf == to_leaf) continue;
      leaves[from_leaf].out_bytes += bytes;
      leaves[to_leaf].in_bytes += bytes;
      const uint32_t from_pod = topology.pod_of_leaf(from_leaf), to_pod = topology.pod_of_leaf(to_leaf);
      if (from_pod == to_pod) continue;
      pods[from_pod].out_bytes += bytes;
      pods[to_pod].in_bytes += bytes;
    }
  const double bytes_per_us = config.link.rate_gbps * 125.0;
  double worst_us = 0;
  for (const std::vector<Cut>* cuts : {&hosts, &leaves, &pods})
    for (const Cut& cut : *cuts)
      worst_us = std::max(worst_us, time_us(cut, bytes_per_us, static_cast<double>(config.failure.at_us)));
  return worst_us + topology.longest_path() * config.link.delay_ns / 1'000.0;
}

}  // namespace sennit::fabric
