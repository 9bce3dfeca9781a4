// SPDX-License-Identifier: Apache-2.0
#include "fabric/routing.hpp"

namespace sennit::fabric {

Routing::Routing(const Topology& topology, uint64_t seed) : topology_(topology) {
  const uint32_t switches = topology.node_count() - topology.host_count();
  groups_.resize(size_t{switches} * topology.leaf_count());
  for (uint32_t number = 0; number < switches; ++number) salts_.push_back(mix(seed, number));
}

void Routing::compute(const std::vector<bool>& is_up) {
  constexpr uint32_t FAR = UINT32_MAX;
  const uint32_t hosts = topology_.host_count();
  links_.clear();
  connected_ = true;
  std::vector<uint32_t> distance(topology_.node_count()), frontier;
  for (uint32_t leaf = 0; leaf < topology_.leaf_count(); ++leaf) {
    // Breadth-first search from the destination, against the direction of the links.
    distance.assign(topology_.node_count(), FAR);
    frontier.assign(1, topology_.leaf_node(leaf));
    distance[frontier[0]] = 0;
    for (size_t next = 0; next < frontier.size(); ++next) {
      const uint32_t node = frontier[next];
      for (const uint32_t link : topology_.links_to(node)) {
        const uint32_t before = topology_.links()[link].from;
        if (!is_up[link] || topology_.is_host(before) || distance[before] != FAR) continue;
        distance[before] = distance[node] + 1;
        frontier.push_back(before);
      }
    }
    for (uint32_t node = hosts; node < topology_.node_count(); ++node) {
      Group& group = groups_[size_t{node - hosts} * topology_.leaf_count() + leaf];
      group.first = static_cast<uint32_t>(links_.size());
      for (const uint32_t link : topology_.links_from(node)) {
        const uint32_t after = topology_.links()[link].to;
        if (is_up[link] && !topology_.is_host(after) && distance[after] != FAR && distance[after] + 1 == distance[node])
          links_.push_back(link);
      }
      group.count = static_cast<uint32_t>(links_.size()) - group.first;
    }
    for (uint32_t other = 0; other < topology_.leaf_count(); ++other)
      connected_ &= distance[topology_.leaf_node(other)] != FAR;
  }
}

}  // namespace sennit::fabric
