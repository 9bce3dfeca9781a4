// SPDX-License-Identifier: Apache-2.0
// A rank over plain UDP sockets for tests: one rail, and the same random numbers each time.
#pragma once

#include <cstdint>
#include <string>

#include "ports/udp/udp_port.hpp"

namespace sennit::test {

inline UdpConfig config_for(const std::string& address, uint32_t path_count = 4) {
  UdpConfig config;
  config.rails = {{address, 0}};
  config.path_count = path_count;
  config.seed = 1;
  return config;
}

}  // namespace sennit::test
