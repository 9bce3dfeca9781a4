// SPDX-License-Identifier: Apache-2.0
// Packets between ranks and an aggregator: docs/reference/aggregation.md, ebpf/include/aggregation.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "../../../ebpf/include/aggregation.h"
#include "../../../ebpf/include/checksum.h"
#include "wire/bytes.hpp"

namespace sennit::aggregation {

inline constexpr size_t HEADER_BYTES = sizeof(aggregation_header);
inline constexpr size_t CHECKSUM_AT = offsetof(aggregation_header, checksum);
inline constexpr size_t PACKET_MAX_BYTES = HEADER_BYTES + AGGREGATION_BLOCK_BYTES;
static_assert(HEADER_BYTES == 40 && CHECKSUM_AT == CHECKSUM_STRIPE_BYTES);
static_assert(AGGREGATION_STRIPE_BYTES == CHECKSUM_STRIPE_BYTES);
static_assert(sizeof(aggregation_join) == AGGREGATION_STRIPE_BYTES);
static_assert(sizeof(aggregation_refusal) == AGGREGATION_STRIPE_BYTES);

// A header in the byte order of the host, without what is the same in all packets.
struct Header {
  uint8_t kind = AGGREGATION_LEAF;
  uint32_t job = 0;
  uint64_t key = 0;
  uint64_t block = 0;
  uint32_t mark = 0;
  uint16_t leaf = 0;
  uint8_t arithmetic = AGGREGATION_SUM_F32;
  uint8_t stripes = 0;

  size_t packet_bytes() const { return HEADER_BYTES + size_t{AGGREGATION_STRIPE_BYTES} * stripes; }
};

// XXH64 of the 32 bytes before the checksum and of the stripes behind it.
inline uint64_t checksum_of(const std::byte* packet, uint32_t stripes) {
  uint64_t sums[4] = {CHECKSUM_SUM_0, CHECKSUM_SUM_1, CHECKSUM_SUM_2, CHECKSUM_SUM_3};
  const auto add = [&sums](const std::byte* stripe) {
    uint64_t words[4];
    std::memcpy(words, stripe, sizeof words);
    for (int n = 0; n < 4; ++n) sums[n] = checksum_word(sums[n], words[n]);
  };
  add(packet);
  for (uint32_t n = 0; n < stripes; ++n) add(packet + HEADER_BYTES + n * AGGREGATION_STRIPE_BYTES);
  return checksum_end(
      checksum_join(sums[0], sums[1], sums[2], sums[3], uint64_t{CHECKSUM_STRIPE_BYTES} * (1 + stripes)));
}

// Writes the header before the stripes, which must be there already.
inline void write_header(std::byte* packet, const Header& header) {
  wire::store_be16(packet, AGGREGATION_MAGIC);
  packet[offsetof(aggregation_header, version)] = std::byte{AGGREGATION_VERSION};
  packet[offsetof(aggregation_header, kind)] = std::byte{header.kind};
  wire::store_be32(packet + offsetof(aggregation_header, job), header.job);
  wire::store_be64(packet + offsetof(aggregation_header, key), header.key);
  wire::store_be64(packet + offsetof(aggregation_header, block), header.block);
  wire::store_be32(packet + offsetof(aggregation_header, mark), header.mark);
  wire::store_be16(packet + offsetof(aggregation_header, leaf), header.leaf);
  packet[offsetof(aggregation_header, arithmetic)] = std::byte{header.arithmetic};
  packet[offsetof(aggregation_header, stripes)] = std::byte{header.stripes};
  wire::store_be64(packet + CHECKSUM_AT, checksum_of(packet, header.stripes));
}

enum class Refusal : uint8_t {
  none,
  truncated,  // shorter than it says, or than a header
  foreign,    // another protocol
  wrong_version,
  malformed,  // longer than it says, or a number that is not allowed
  corrupt,    // the checksum is another one
};

// Reads a packet. Of the header's numbers, those are checked that say how long it is and what it is.
[[nodiscard]] inline Refusal read_packet(std::span<const std::byte> packet, Header& out) {
  if (packet.size() < HEADER_BYTES) return Refusal::truncated;
  const std::byte* from = packet.data();
  if (wire::load_be16(from) != AGGREGATION_MAGIC) return Refusal::foreign;
  if (from[offsetof(aggregation_header, version)] != std::byte{AGGREGATION_VERSION}) return Refusal::wrong_version;
  out.kind = static_cast<uint8_t>(from[offsetof(aggregation_header, kind)]);
  out.job = wire::load_be32(from + offsetof(aggregation_header, job));
  out.key = wire::load_be64(from + offsetof(aggregation_header, key));
  out.block = wire::load_be64(from + offsetof(aggregation_header, block));
  out.mark = wire::load_be32(from + offsetof(aggregation_header, mark));
  out.leaf = wire::load_be16(from + offsetof(aggregation_header, leaf));
  out.arithmetic = static_cast<uint8_t>(from[offsetof(aggregation_header, arithmetic)]);
  out.stripes = static_cast<uint8_t>(from[offsetof(aggregation_header, stripes)]);
  if (packet.size() < out.packet_bytes()) return Refusal::truncated;
  if (packet.size() > out.packet_bytes() || out.stripes > AGGREGATION_STRIPES_MAX || out.kind > AGGREGATION_LEAVE ||
      out.arithmetic > AGGREGATION_SUM_BF16)
    return Refusal::malformed;
  if (wire::load_be64(from + CHECKSUM_AT) != checksum_of(from, out.stripes)) return Refusal::corrupt;
  return Refusal::none;
}

}  // namespace sennit::aggregation
