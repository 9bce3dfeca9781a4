// SPDX-License-Identifier: Apache-2.0
#include "flow/congestion.hpp"

#include "flow/registry.hpp"

namespace sennit::flow {
namespace {

constexpr Registry REGISTRY(std::to_array<Named<decltype(&make_swift)>>({
    {"fixed", make_fixed_window},
    {"swift", make_swift},
}));

}  // namespace

std::span<const std::string_view> congestion_controls() { return REGISTRY.names; }

std::unique_ptr<CongestionControl> make_congestion_control(std::string_view name, const CongestionLimits& limits) {
  return REGISTRY.find("congestion", name)(limits);
}

}  // namespace sennit::flow
