// SPDX-License-Identifier: Apache-2.0
#include "fabric/topology.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "fabric/hash.hpp"

namespace sennit::fabric {
namespace {

constexpr uint32_t HOSTS_MAX = 65'536;
constexpr uint32_t PORTS_MAX = 1'024;

void require(bool condition, const std::string& what) {
  if (!condition) throw std::invalid_argument(what);
}

const TopologyConfig& checked(const TopologyConfig& config) {
  const auto text = [](uint32_t value) { return std::to_string(value); };
  require(config.hosts >= 2 && config.hosts <= HOSTS_MAX, "hosts is " + text(config.hosts) + "; allowed: 2..65536");
  require(config.hosts_per_leaf >= 1 && config.hosts % config.hosts_per_leaf == 0,
          "hosts_per_leaf is " + text(config.hosts_per_leaf) + "; allowed: a divisor of hosts (" + text(config.hosts) +
              ")");
  require(config.spines >= 1 && config.spines <= PORTS_MAX,
          "spines is " + text(config.spines) + "; allowed: 1.." + text(PORTS_MAX));
  if (config.leaves_per_pod == 0) {
    require(config.cores_per_spine == 0, "cores_per_spine takes three tiers (leaves_per_pod)");
    return config;
  }
  const uint32_t leaves = config.hosts / config.hosts_per_leaf;
  require(leaves % config.leaves_per_pod == 0, "leaves_per_pod is " + text(config.leaves_per_pod) +
                                                   "; allowed: a divisor of the leaves (" + text(leaves) + ")");
  require(config.cores_per_spine >= 1 && config.cores_per_spine <= PORTS_MAX,
          "cores_per_spine is " + text(config.cores_per_spine) + "; allowed: 1.." + text(PORTS_MAX));
  return config;
}

}  // namespace

Topology::Topology(const TopologyConfig& config) : config_(checked(config)) {
  leaf_count_ = config.hosts / config.hosts_per_leaf;
  const uint32_t spine_count = pod_count() * config.spines;
  const uint32_t core_count = config.leaves_per_pod == 0 ? 0 : config.spines * config.cores_per_spine;
  const uint32_t first_spine = config.hosts + leaf_count_;
  const uint32_t first_core = first_spine + spine_count;
  node_count_ = first_core + core_count;
  links_from_.resize(node_count_);
  links_to_.resize(node_count_);

  for (uint32_t host = 0; host < config.hosts; ++host) connect(host, leaf_node(leaf_of(host)));
  for (uint32_t leaf = 0; leaf < leaf_count_; ++leaf)
    for (uint32_t spine = 0; spine < config.spines; ++spine)
      connect(leaf_node(leaf), first_spine + pod_of_leaf(leaf) * config.spines + spine);
  first_core_cable_ = cable_count();
  if (core_count == 0) return;
  for (uint32_t spine = 0; spine < spine_count; ++spine)
    for (uint32_t core = 0; core < config.cores_per_spine; ++core)
      connect(first_spine + spine, first_core + spine % config.spines * config.cores_per_spine + core);
}

void Topology::connect(uint32_t lower, uint32_t upper) {
  for (const auto& [from, to] : {std::pair{lower, upper}, std::pair{upper, lower}}) {
    const auto link = static_cast<uint32_t>(links_.size());
    links_.push_back({from, to});
    links_from_[from].push_back(link);
    links_to_[to].push_back(link);
  }
}

uint32_t Topology::longest_path() const {
  if (leaf_count_ == 1) return 2;
  return pod_count() == 1 ? 4 : 6;
}

std::vector<uint32_t> Topology::choose_cables(double fraction, uint64_t seed) const {
  require(fraction >= 0 && fraction <= 1, "the failed fraction is " + std::to_string(fraction) + "; allowed: 0 to 1");
  std::vector<uint32_t> cables(cable_count() - first_fabric_cable());
  std::iota(cables.begin(), cables.end(), first_fabric_cable());
  if (fraction == 0) return {};
  auto wanted = static_cast<size_t>(std::llround(fraction * static_cast<double>(cables.size())));
  wanted = std::clamp<size_t>(wanted, 1, cables.size());
  // Fisher-Yates shuffle, as far as needed.
  for (size_t i = 0; i < wanted; ++i) std::swap(cables[i], cables[i + mix(seed, i) % (cables.size() - i)]);
  cables.resize(wanted);
  return cables;
}

}  // namespace sennit::fabric
