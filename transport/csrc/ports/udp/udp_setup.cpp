// SPDX-License-Identifier: Apache-2.0
#include "ports/udp/udp_setup.hpp"

#include <algorithm>
#include <bit>
#include <optional>
#include <stdexcept>
#include <utility>

#include "wire/packet.hpp"

namespace sennit {
namespace {

constexpr size_t HEADERS_BYTES = 40 + 8 + wire::DATA_HEADER_BYTES + wire::ICRC_BYTES;  // IPv6, UDP, ours

// The kernel charges a socket for whole buffers, not for payload. A 62 KB batch costs little more than its size, single
// packets cost two to four times theirs.
uint64_t overhead_of(uint32_t payload_bytes) { return payload_bytes >= 4'096 ? 2 : 4; }

// In a smaller window, too few packets are under way to keep both ends busy.
constexpr uint64_t LOCAL_WINDOW_PACKETS = 32;

std::optional<UdpSocket> open_unless_taken(const std::string& address, uint16_t port) {
  try {
    return UdpSocket(wire::parse_endpoint(address, port));
  } catch (const std::system_error& error) {
    if (error.code().value() != EADDRINUSE) throw;
    return std::nullopt;
  }
}

// The first free port at or after `from`, wrapping from the last port to the first.
UdpSocket open_in_range(const std::string& address, const PortRange& ports, uint16_t from) {
  uint16_t port = from;
  do {
    if (std::optional<UdpSocket> socket = open_unless_taken(address, port)) return std::move(*socket);
    port = port == ports.last ? ports.first : static_cast<uint16_t>(port + 1);
  } while (port != from);
  throw std::system_error(EADDRINUSE, std::generic_category(),
                          "udp: all ports of SENNIT_PORTS=" + std::to_string(ports.first) + "-" +
                              std::to_string(ports.last) + " are taken at " + address +
                              ": each process takes one for each path (SENNIT_PATHS), and one more for each of its "
                              "groups; widen the range");
}

}  // namespace

UdpSocket open_listener(const std::string& address, uint16_t port, const PortRange& ports) {
  if (port != 0) return UdpSocket(wire::parse_endpoint(address, port));
  const bool is_limited = ports.first != 0;
  if (!is_limited || (ports.first <= wire::ROCE_UDP_PORT && wire::ROCE_UDP_PORT <= ports.last))
    if (std::optional<UdpSocket> socket = open_unless_taken(address, wire::ROCE_UDP_PORT)) return std::move(*socket);
  if (is_limited) return open_in_range(address, ports, ports.first);
  return UdpSocket(wire::parse_endpoint(address, 0));  // several ranks share this address
}

UdpSocket open_sender(const std::string& address, const PortRange& ports) {
  if (ports.first != 0) {
    const uint32_t count = ports.last - ports.first + 1u;
    return open_in_range(address, ports, static_cast<uint16_t>(ports.first + random_value<uint16_t>() % count));
  }
  constexpr int ATTEMPT_COUNT = 64;
  for (int attempt = 1;; ++attempt) {
    const auto port = static_cast<uint16_t>(wire::ENTROPY_PORT_MIN | random_value<uint16_t>());
    try {
      return UdpSocket(wire::parse_endpoint(address, port));
    } catch (const std::system_error& error) {
      if (error.code().value() != EADDRINUSE || attempt == ATTEMPT_COUNT) throw;
    }
  }
}

bool takes_local_packets(const std::vector<Interface>& interfaces, bool is_ipv6, uint64_t window_bytes) {
  return loopback_mtu_bytes(interfaces, is_ipv6) >= HEADERS_BYTES + wire::LOCAL_PAYLOAD_MAX_BYTES &&
         window_bytes >= LOCAL_WINDOW_PACKETS * wire::LOCAL_PAYLOAD_MAX_BYTES;
}

uint32_t payload_for_mtu(size_t mtu_bytes, const wire::Endpoint& local) {
  if (mtu_bytes < 256 + HEADERS_BYTES)
    throw std::invalid_argument("udp: the interface of " + text_of(local) + " has an MTU of " +
                                std::to_string(mtu_bytes) + " bytes; at least " + std::to_string(256 + HEADERS_BYTES) +
                                " are needed");
  return static_cast<uint32_t>(std::min(std::bit_floor(mtu_bytes - HEADERS_BYTES), wire::PAYLOAD_MAX_BYTES));
}

// Packets between two addresses of one machine take the loopback interface, whatever interfaces have the addresses.
// Both ends see the same: if the peer's address is ours, our packets to it stay on this machine.
uint32_t pair_payload(const std::vector<Interface>& interfaces, const RoceOffer::Rail& ours,
                      const RoceOffer::Rail& theirs) {
  if (facts_of(interfaces, theirs.listen).mtu_bytes != 0)
    if (const size_t mtu_bytes = loopback_mtu_bytes(interfaces, theirs.listen.is_ipv6))
      return payload_for_mtu(mtu_bytes, theirs.listen);
  return std::min(ours.payload_max_bytes, theirs.payload_max_bytes);
}

// The kernel returns charged memory only in quarters.
uint64_t window_for(size_t granted_bytes, uint32_t payload_max_bytes, uint32_t peer_count) {
  return granted_bytes / 4 * 3 / overhead_of(payload_max_bytes) / std::max(peer_count, 1u);
}

uint64_t window_at(const RoceOffer& offer, uint32_t payload_bytes) {
  uint32_t offered_bytes = wire::PAYLOAD_MAX_BYTES;
  for (const RoceOffer::Rail& rail : offer.rails) offered_bytes = std::min(offered_bytes, rail.payload_max_bytes);
  const uint64_t offered = overhead_of(offered_bytes), used = std::max(overhead_of(payload_bytes), offered);
  return offer.receive_window_bytes / used * offered;
}

}  // namespace sennit
