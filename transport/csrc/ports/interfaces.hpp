// SPDX-License-Identifier: Apache-2.0
// The network interfaces of the calling thread's network namespace, and their addresses. Linux.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "wire/endpoint.hpp"

namespace sennit {

struct InterfaceAddress {
  wire::Endpoint endpoint;  // port 0
  uint8_t prefix_bits = 0;  // of its subnet
  // A peer could send to it: it is not link-local, tentative, duplicate or deprecated (RFC 4862).
  bool is_offered = false;
};

struct Interface {
  std::string name;
  bool is_up = false, is_loopback = false;
  size_t mtu_bytes = 0;
  // In the kernel's order. Temporary ones (RFC 8981) come last, because the kernel soon replaces them.
  std::vector<InterfaceAddress> addresses;
};

// By index. `if_inet6` is the kernel's table of IPv6 addresses: getifaddrs does not tell their state.
std::vector<Interface> read_interfaces(const std::string& if_inet6 = "/proc/thread-self/net/if_inet6");

// The interface that has this address. All zero if none has it, because the address belongs to another machine.
struct InterfaceFacts {
  size_t mtu_bytes = 0;
  uint8_t prefix_bits = 0;  // of the address's subnet
};
InterfaceFacts facts_of(const std::vector<Interface>& interfaces, const wire::Endpoint& local);
// The MTU between two addresses of this machine, whichever interfaces have them. 0 without that family.
size_t loopback_mtu_bytes(const std::vector<Interface>& interfaces, bool is_ipv6);

}  // namespace sennit
