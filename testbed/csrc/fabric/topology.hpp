// SPDX-License-Identifier: Apache-2.0
// A Clos fabric as a graph: hosts and switches, and the one-way links between them.
//
// Nodes are numbered hosts first, then leaves, spines, cores. A cable is two links, 2c towards the cores and 2c + 1
// back; the first `hosts` cables are those of the hosts.
#pragma once
#include <cstdint>
#include <vector>

#include "fabric/config.hpp"

namespace sennit::fabric {

struct TopologyLink {
  uint32_t from, to;
};

class Topology {
 public:
  // Throws std::invalid_argument for an impossible shape.
  explicit Topology(const TopologyConfig& config);

  uint32_t host_count() const { return config_.hosts; }
  uint32_t leaf_count() const { return leaf_count_; }
  uint32_t node_count() const { return node_count_; }
  uint32_t pod_count() const { return config_.leaves_per_pod == 0 ? 1 : leaf_count_ / config_.leaves_per_pod; }
  bool is_host(uint32_t node) const { return node < config_.hosts; }
  uint32_t leaf_of(uint32_t host) const { return host / config_.hosts_per_leaf; }
  uint32_t pod_of_leaf(uint32_t leaf) const { return config_.leaves_per_pod == 0 ? 0 : leaf / config_.leaves_per_pod; }
  uint32_t leaf_node(uint32_t leaf) const { return config_.hosts + leaf; }

  const std::vector<TopologyLink>& links() const { return links_; }
  uint32_t cable_count() const { return static_cast<uint32_t>(links_.size() / 2); }
  uint32_t first_fabric_cable() const { return config_.hosts; }
  // Cables below this number are between leaves and spines, the others between spines and cores.
  uint32_t first_core_cable() const { return first_core_cable_; }
  static uint32_t up_link(uint32_t cable) { return 2 * cable; }
  static uint32_t down_link(uint32_t cable) { return 2 * cable + 1; }
  // Returns the links that leave a node.
  const std::vector<uint32_t>& links_from(uint32_t node) const { return links_from_[node]; }
  const std::vector<uint32_t>& links_to(uint32_t node) const { return links_to_[node]; }
  // Returns the pod of the spine where a core cable starts.
  uint32_t pod_of_core_cable(uint32_t cable) const {
    return (links_[up_link(cable)].from - config_.hosts - leaf_count_) / config_.spines;
  }
  // Returns the number of links between the two farthest hosts.
  uint32_t longest_path() const;

  // Returns a seeded choice of `fraction` of the cables between switches, rounded, at least one.
  std::vector<uint32_t> choose_cables(double fraction, uint64_t seed) const;

 private:
  void connect(uint32_t lower, uint32_t upper);

  TopologyConfig config_;
  uint32_t leaf_count_ = 0, node_count_ = 0, first_core_cable_ = 0;
  std::vector<TopologyLink> links_;
  std::vector<std::vector<uint32_t>> links_from_, links_to_;
};

}  // namespace sennit::fabric
