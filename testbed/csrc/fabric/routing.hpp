// SPDX-License-Identifier: Apache-2.0
// Equal-cost multi-path: for each switch and destination leaf, the links on shortest paths over what is up.
//
// Hop counts over all living links, as eBGP in a data centre computes them (RFC 7938): a leaf that lost its link to
// a spine is not reached through that spine any more, since the detour over another leaf is longer.
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
  // `is_up`: one flag a link.
  void compute(const std::vector<bool>& is_up);
  // Whether every leaf reaches every other.
  bool is_connected() const { return connected_; }
  // The next hops at a switch that is not the destination's leaf.
  std::span<const uint32_t> next_hops(uint32_t node, uint32_t leaf) const {
    const Group& group = groups_[(node - topology_.host_count()) * topology_.leaf_count() + leaf];
    return {links_.data() + group.first, group.count};
  }
  // The link that a switch's hash picks; `tuple` stands for the packet's 5-tuple. Every switch has a salt of its own,
  // or those of the second tier would use one link each.
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
