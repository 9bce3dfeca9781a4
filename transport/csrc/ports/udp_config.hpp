// SPDX-License-Identifier: Apache-2.0
// What a udp port is asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sennit {

struct UdpRailConfig {
  std::string address;  // IPv4 or IPv6, of this machine
  uint16_t port = 0;    // of the listening socket; 0: 4791, or any if that is taken
};

struct UdpConfig {
  std::vector<UdpRailConfig> rails;
  uint32_t path_count = 4;  // entropies a peer and rail
  uint64_t seed = 0;        // of choices that tests repeat; keys and queue pairs are always random
  // Of what this rank sends; peers need not have the same ones.
  std::string path_policy = "round_robin", congestion = "fixed";  // flow/path_policy.hpp, flow/congestion.hpp
  // Most in flight to one peer, whose receive memory may allow less. More than fits the processor's second-level
  // cache only makes copies slower, unless the network holds more in a round trip.
  uint32_t window_bytes = 2 << 20;
  size_t receive_buffer_bytes = 0;  // of each listening socket; 0: by the number of peers

  // Throws std::invalid_argument with the value and what is allowed.
  void check() const;
};

}  // namespace sennit
