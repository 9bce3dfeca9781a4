// SPDX-License-Identifier: Apache-2.0
// Equal-cost multi-path: for each switch and destination leaf, the links on shortest paths that are up.
//
// Counts hops over all living links, as eBGP in a data centre does (RFC 7938). If a leaf lost its link to a spine, no
// path to the leaf uses that spine any more, because the detour over another leaf is longer.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "fabric/hash.hpp"
#include "fabric/topology.hpp"

namespace sennit::fabric {

class Routing {
 public:
  Routing(const Topology& topology, uint64_t seed);
  // `is_up`: one flag for each link.
  void compute(const std::vector<bool>& is_up);
  // Whether every leaf reaches every other leaf.
  bool is_connected() const { return connected_; }
  // Returns the next hops at a switch other than the destination's leaf.
  std::span<const uint32_t> next_hops(uint32_t node, uint32_t leaf) const {
    const Group& group = groups_[(node - topology_.host_count()) * topology_.leaf_count() + leaf];
    return {links_.data() + group.first, group.count};
  }
  // Returns the link that a switch's hash picks; `tuple` stands for the packet's 5-tuple. Every switch has its own
  // salt. Otherwise each switch of the second tier would use only one link.
  uint32_t pick(std::span<const uint32_t> group, uint32_t node, uint64_t tuple) const {
    return group[(mix(tuple ^ salts_[node - topology_.host_count()]) >> 32) * group.size() >> 32];
  }

 private:
  struct Group {
    uint32_t first, count;
  };
  const Topology& topology_;
  std::vector<uint64_t> salts_;
  std::vector<Group> groups_;
  std::vector<uint32_t> links_;
  bool connected_ = true;
};

}  // namespace sennit::fabric
