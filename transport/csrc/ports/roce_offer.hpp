// SPDX-License-Identifier: Apache-2.0
// What a rank tells its peers so that they can send to it: addresses, ports, queue pairs, keys.
//
// Little-endian (docs/reference/wire.md, "Offer"). One part goes to all peers through rendezvous. What belongs to one
// peer goes to that peer alone: in a group of 1,000 ranks it would otherwise be most of what everybody reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "wire/endpoint.hpp"

namespace sennit {

struct RoceOffer {
  static constexpr uint32_t VERSION = 7;

  struct Rail {
    wire::Endpoint listen;            // where all packets for this rank go
    uint8_t prefix_bits = 0;          // of the subnet of its address; 0: unknown
    uint8_t device = 0;               // the device whose key opens a message here; each device has its own key
    uint8_t interface = 0;            // rails of the same number are addresses of one interface, one of each family
    uint32_t payload_max_bytes = 0;   // the payload that fits the interface's MTU
    std::vector<uint16_t> entropies;  // source ports of its sending sockets: one for each path
  };
  struct Peer {                  // what one peer needs to know
    std::vector<uint32_t> qpns;  // [rail * path_count + path]
    uint32_t eager_rkey = 0;     // for a device: 0

    std::vector<std::byte> encode() const;
  };

  uint32_t rank = 0, size = 0;
  // An RDMA device, not a socket, sends and receives for this rank. It always uses UDP port 4791. Eager packets come as
  // SEND ONLY with immediate, into memory that the receiver chooses (docs/decisions/0030).
  bool is_device = false;
  bool is_reliable = false;  // its queue pairs use the reliable service; only for devices, and only on both sides
  // Packets between sockets of this rank's address may have LOCAL_PAYLOAD_MAX_BYTES (wire/packet.hpp).
  bool takes_local_packets = false;
  uint32_t path_count = 0;  // entropies for each rail
  uint32_t eager_slot_count = 0;
  uint64_t receive_window_bytes = 0;  // how much one peer may have in flight to this rank
  uint64_t eager_base = 0;            // address of the eager rings, one for each rank; for a device: 0
  std::vector<Rail> rails;
  Peer for_reader;  // without queue pairs: the part for all peers alone

  // Where the eager ring for `reader` begins. For a device: 0.
  uint64_t eager_address(uint32_t reader) const;

  std::vector<std::byte> encode() const;
  // Both parts, one after the other. Throws std::invalid_argument. For another version or wire revision the message
  // names both.
  static RoceOffer decode(std::span<const std::byte> bytes);
};

// The pairs of rails between two ranks: ours, theirs.
struct RailPairs {
  using Pair = std::pair<size_t, size_t>;
  std::vector<Pair> first;
  // IPv4 pairs whose interface has an IPv6 pair. Each is used only if that one carries nothing.
  std::vector<Pair> reserves;
  std::vector<uint32_t> reserve_of;  // for each reserve: the place of its IPv6 pair in `first`
};
// Pairs the rails of both ends, IPv6 before IPv4: first rails in one subnet, then the rest in order. Both ends get the
// same pairs in the same order.
RailPairs pair_rails(const RoceOffer& ours, const RoceOffer& theirs);

}  // namespace sennit
