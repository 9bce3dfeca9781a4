// SPDX-License-Identifier: Apache-2.0
// Both parts of what a rank tells one peer, as rendezvous puts them together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "executor/engine.hpp"

namespace sennit::test {

inline std::vector<std::byte> joined(std::vector<std::byte> for_all, const std::vector<std::byte>& for_peer) {
  for_all.insert(for_all.end(), for_peer.begin(), for_peer.end());
  return for_all;
}

template <class Port>
std::vector<std::byte> info_of(const Port& port, uint32_t peer) {
  return joined(port.local_info(), port.info_for(peer));
}

// `info_from(peer)`: what that peer tells this rank.
template <class InfoFrom>
std::vector<Route> udp_routes(uint32_t rank, uint32_t world, InfoFrom info_from) {
  std::vector<Route> routes;
  for (uint32_t peer = 0; peer < world; ++peer)
    routes.push_back(peer == rank ? Route{Route::Kind::self, {}} : Route{Route::Kind::udp, info_from(peer)});
  return routes;
}

}  // namespace sennit::test
