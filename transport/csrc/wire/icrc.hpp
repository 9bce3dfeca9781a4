// SPDX-License-Identifier: Apache-2.0
// The invariant CRC of RoCEv2: CRC-32 over pseudo network headers, BTH and all that follows.
//
// IBTA annex A17.3.3: eight bytes of ones (in place of a local routing header), the IP and UDP headers with the fields
// that routers may change set to ones, then the InfiniBand packet with byte 4 of BTH (FECN, BECN, reserved) set to
// ones. The result is sent least significant byte first. A CRC state here is a plain CRC-32 value: `extend(extend(0,
// a), b)` is the CRC of a then b, so the payload is read in place. ISA-L computes it (docs/decisions/0010), or tables
// of our own where a build has no ISA-L.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "wire/endpoint.hpp"

namespace sennit::wire {

// "ISA-L", or "tables".
std::string_view crc_by();

uint32_t extend(uint32_t crc, std::span<const std::byte> bytes);
// `header` starts with BTH. Its byte 4 counts as ones.
uint32_t extend_with_header(uint32_t crc, std::span<const std::byte> header);

// The CRC up to and including the UDP header, for one direction of one path.
class NetworkCrc {
 public:
  // If an unconnected UDP socket forbids fragments, Linux numbers the segments of one UDP_SEGMENT send 0, 1, 2, …: the
  // IPv4 identification is the index in the batch. IPv6 has none.
  static constexpr uint32_t IDENTIFICATION_COUNT = 64;

  NetworkCrc() = default;
  // Both endpoints must be of one family. The CRC for `common_packet_bytes` (a full payload) is looked up.
  NetworkCrc(const Endpoint& source, const Endpoint& destination, size_t common_packet_bytes);

  bool is_ipv6() const { return source_.is_ipv6; }
  uint32_t of(size_t packet_bytes, uint32_t identification) const {
    if (packet_bytes == common_packet_bytes_)
      return common_[source_.is_ipv6 ? 0 : identification % IDENTIFICATION_COUNT];
    return compute(packet_bytes, identification);
  }

 private:
  uint32_t compute(size_t packet_bytes, uint32_t identification) const;

  Endpoint source_{}, destination_{};
  size_t common_packet_bytes_ = 0;
  std::array<uint32_t, IDENTIFICATION_COUNT> common_{};
};

// Writes pad and ICRC after a payload. Returns how many bytes (4 to 7). `crc` covers header and payload.
size_t write_trailer(std::span<std::byte, 7> out, uint32_t crc, uint8_t pad_bytes);

}  // namespace sennit::wire
