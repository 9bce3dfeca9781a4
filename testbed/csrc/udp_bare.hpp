// SPDX-License-Identifier: Apache-2.0
// The upper bound of the udp port: the same bytes both ways with the same system calls, and nothing else.
//
// It has no flow, no ICRC and no acknowledgements. Benchmarks run it beside the port and print the ratio.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ports/udp/udp_socket.hpp"

namespace sennit {

class UdpBare {
 public:
  explicit UdpBare(const std::string& local_address);
  uint16_t port() const { return socket_.local().port; }
  // Sends `size_bytes` and receives as many. Both sides call it at about the same time with each other's port. Returns
  // the seconds from the moment when both sides were there. Throws std::runtime_error at the deadline, which means a
  // lost packet, because lost packets are not sent again.
  double exchange(const std::string& peer_address, uint16_t peer_port, uint64_t size_bytes, double timeout_s);

 private:
  UdpSocket socket_;
  uint64_t window_bytes_;
  std::vector<std::byte> source_, destination_;
};

}  // namespace sennit
