// SPDX-License-Identifier: Apache-2.0
// The checksum of a packet (docs/reference/records.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "xxh64.hpp"

namespace sennit::offload {

constexpr std::size_t HEADER_BYTES = 32;
constexpr std::size_t CHECKSUM_AT = 24;  // eight bytes, the last word of the first stripe
static_assert(HEADER_BYTES == CHECKSUM_STRIPE_BYTES && CHECKSUM_AT == 24);

// XXH64 of the packet with zeros in place of its checksum. The packet has at least a header.
inline std::uint64_t checksum_of(std::span<const std::uint8_t> packet) {
  const auto* at = reinterpret_cast<const char*>(packet.data());
  const char* const end = at + packet.size();
  std::array<char, HEADER_BYTES> header{};
  std::memcpy(header.data(), at, CHECKSUM_AT);
  const char* first = header.data();
  Xxh64Sums sums;
  sums.add(first);
  at += HEADER_BYTES;
  while (end - at >= CHECKSUM_STRIPE_BYTES) sums.add(at);
  return xxh64_tail(sums.join(packet.size()), at, end);
}

}  // namespace sennit::offload
