// SPDX-License-Identifier: Apache-2.0
// A UDP endpoint, IPv4 or IPv6: parsed from text and printed for people.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace sennit::wire {

struct Endpoint {
  bool is_ipv6 = true;
  std::array<std::byte, 16> address{};  // network order; IPv4 uses the first four
  uint16_t port = 0;
  bool operator==(const Endpoint&) const = default;
};

// Parses a literal IPv4 or IPv6 address without scope. Throws std::invalid_argument.
Endpoint parse_endpoint(const std::string& address, uint16_t port);
std::string address_text(const Endpoint& endpoint);  // "192.0.2.1" or "2001:db8::1"
std::string text_of(const Endpoint& endpoint);       // "192.0.2.1:4791" or "[2001:db8::1]:4791"

}  // namespace sennit::wire
