// SPDX-License-Identifier: Apache-2.0
#include "flow/congestion.hpp"

#include <stdexcept>
#include <string>

namespace sennit::flow {

std::unique_ptr<CongestionControl> make_congestion_control(std::string_view name, const CongestionLimits& limits) {
  if (name == "fixed") return make_fixed_window(limits);
  if (name == "swift") return make_swift(limits);
  throw std::invalid_argument("congestion must be \"fixed\" or \"swift\", not \"" + std::string(name) + "\"");
}

}  // namespace sennit::flow
