// SPDX-License-Identifier: Apache-2.0
// A UDP endpoint, IPv4 or IPv6: parsed from text and printed for people.
#pragma once

#include <arpa/inet.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace sennit::wire {

struct Endpoint {
  bool is_ipv6 = true;
  std::array<std::byte, 16> address{};  // network order; IPv4 uses the first four
  uint16_t port = 0;
  bool operator==(const Endpoint&) const = default;
};

// Parses a literal IPv4 or IPv6 address without scope. Throws std::invalid_argument.
inline Endpoint parse_endpoint(const std::string& address, uint16_t port) {
  Endpoint end;
  end.port = port;
  end.is_ipv6 = address.find(':') != std::string::npos;
  if (inet_pton(end.is_ipv6 ? AF_INET6 : AF_INET, address.c_str(), end.address.data()) != 1)
    throw std::invalid_argument("\"" + address + "\" is not an IPv4 or IPv6 address (write 192.0.2.1 or 2001:db8::1)");
  return end;
}

// "192.0.2.1" or "2001:db8::1"
inline std::string address_text(const Endpoint& endpoint) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(endpoint.is_ipv6 ? AF_INET6 : AF_INET, endpoint.address.data(), text, sizeof text);
  return text;
}

// "192.0.2.1:4791" or "[2001:db8::1]:4791"
inline std::string text_of(const Endpoint& endpoint) {
  std::string out = endpoint.is_ipv6 ? "[" : "";
  out += address_text(endpoint);
  out += endpoint.is_ipv6 ? "]:" : ":";
  return out += std::to_string(endpoint.port);
}

}  // namespace sennit::wire
