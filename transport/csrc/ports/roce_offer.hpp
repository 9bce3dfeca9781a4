// SPDX-License-Identifier: Apache-2.0
// What a rank tells its peers so that they can send to it: addresses, ports, queue pairs, keys.
//
// One offer goes to all peers through rendezvous, little-endian (docs/reference/wire.md, "Offer").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "wire/endpoint.hpp"

namespace sennit {

struct RoceOffer {
  static constexpr uint32_t VERSION = 4;

  struct Rail {
    wire::Endpoint listen;            // where all packets for this rank go
    uint8_t prefix_bits = 0;          // of its address's subnet; 0: unknown
    uint8_t device = 0;               // whose key of a message opens it here: of several devices each has its own
    uint32_t payload_max_bytes = 0;   // what fits the interface's MTU
    std::vector<uint16_t> entropies;  // source ports of its sending sockets: one a path
  };
  struct Peer {                  // what one peer needs
    std::vector<uint32_t> qpns;  // [rail * path_count + path]
    uint64_t eager_address = 0;  // of a device: 0
    uint32_t eager_rkey = 0;
  };

  uint32_t rank = 0, size = 0;
  // An RDMA device sends and receives for this rank, not a socket: always at UDP port 4791, and eager packets come as
  // SEND ONLY with immediate, into memory that the receiver chooses (docs/decisions/0030).
  bool is_device = false;
  bool is_reliable = false;  // its queue pairs are of the reliable service; only a device's, and then of both sides
  uint32_t path_count = 0;   // entropies a rail
  uint32_t eager_slot_count = 0;
  uint64_t receive_window_bytes = 0;  // most that one peer may have on the way to this rank
  std::vector<Rail> rails;
  std::vector<Peer> peers;  // by rank; this rank's own entry is empty of meaning

  std::vector<std::byte> encode() const;
  // Throws std::invalid_argument; another version or wire revision is refused naming both.
  static RoceOffer decode(std::span<const std::byte> bytes);
};

// Rails of both ends in pairs, IPv6 before IPv4: those in one subnet together, the rest in order. Both ends come to the
// same pairs in the same order.
std::vector<std::pair<size_t, size_t>> pair_rails(const RoceOffer& ours, const RoceOffer& theirs);

}  // namespace sennit
