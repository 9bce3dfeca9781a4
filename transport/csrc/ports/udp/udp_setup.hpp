// SPDX-License-Identifier: Apache-2.0
// Set-up of the udp port: which sockets a rail opens, and how large its packets and windows may be.
//
// All functions throw std::system_error or std::invalid_argument with what to do.
#pragma once

#include <sys/random.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <system_error>
#include <vector>

#include "ports/interfaces.hpp"
#include "ports/roce_offer.hpp"
#include "ports/udp/udp_socket.hpp"

namespace sennit {

template <class T>
T random_value() {
  T value;
  if (getrandom(&value, sizeof value, 0) != static_cast<ssize_t>(sizeof value))
    throw std::system_error(errno, std::generic_category(), "udp: getrandom");
  return value;
}

// Port 0: RoCE's port, or any of `ports` if that one is taken or not in the range.
UdpSocket open_listener(const std::string& address, uint16_t port, const PortRange& ports);
// Binds to a random port of RoCE's range, or of `ports`: the entropy of a path.
UdpSocket open_sender(const std::string& address, const PortRange& ports);

// Whether packets of LOCAL_PAYLOAD_MAX_BYTES fit the loopback interface, and enough of them into `window_bytes`.
bool takes_local_packets(const std::vector<Interface>& interfaces, bool is_ipv6, uint64_t window_bytes);
// The largest path MTU of IBTA that fits the interface of `local`.
uint32_t payload_for_mtu(size_t mtu_bytes, const wire::Endpoint& local);
// The payload between two rails of two ranks. `interfaces`: this machine's.
uint32_t pair_payload(const std::vector<Interface>& interfaces, const RoceOffer::Rail& ours,
                      const RoceOffer::Rail& theirs);
// How much each peer may have in flight into a receive buffer.
uint64_t window_for(size_t granted_bytes, uint32_t payload_max_bytes, uint32_t peer_count);

// How much a peer may have in flight to the rank of `offer`. Packets of a smaller payload fill its buffer sooner.
uint64_t window_at(const RoceOffer& offer, uint32_t payload_bytes);

}  // namespace sennit
