// SPDX-License-Identifier: Apache-2.0
// The checksum of a packet (docs/reference/records.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "../../ebpf/include/checksum.h"

namespace sennit::offload {

constexpr std::size_t HEADER_BYTES = 32;
constexpr std::size_t CHECKSUM_AT = 24;  // eight bytes, the last word of the first stripe
static_assert(HEADER_BYTES == CHECKSUM_STRIPE_BYTES && CHECKSUM_AT == 24);

// XXH64 of the packet with zeros in place of its checksum. The packet has at least a header.
inline std::uint64_t checksum_of(std::span<const std::uint8_t> packet) {
  const std::uint8_t *at = packet.data(), *const end = at + packet.size();
  const auto word = [&at]<typename Number>(Number number) {
    std::memcpy(&number, at, sizeof number);
    at += sizeof number;
    return number;
  };
  std::uint64_t a = CHECKSUM_SUM_0, b = CHECKSUM_SUM_1, c = CHECKSUM_SUM_2, d = CHECKSUM_SUM_3;
  a = checksum_word(a, word(std::uint64_t{}));
  b = checksum_word(b, word(std::uint64_t{}));
  c = checksum_word(c, word(std::uint64_t{}));
  d = checksum_word(d, 0);
  at += 8;
  while (end - at >= CHECKSUM_STRIPE_BYTES) {
    a = checksum_word(a, word(std::uint64_t{}));
    b = checksum_word(b, word(std::uint64_t{}));
    c = checksum_word(c, word(std::uint64_t{}));
    d = checksum_word(d, word(std::uint64_t{}));
  }
  std::uint64_t all = checksum_join(a, b, c, d, packet.size());
  while (end - at >= 8) all = checksum_tail_word(all, word(std::uint64_t{}));
  if (end - at >= 4) all = checksum_tail_half(all, word(std::uint32_t{}));
  while (at < end) all = checksum_tail_byte(all, *at++);
  return checksum_end(all);
}

}  // namespace sennit::offload
