// SPDX-License-Identifier: Apache-2.0
#include "wire/icrc.hpp"

#if SENNIT_ISAL
#include <isa-l/crc.h>
#endif

#include <algorithm>
#include <cstring>

#include "sennit/crc32.hpp"
#include "wire/bytes.hpp"
#include "wire/packet.hpp"

namespace sennit::wire {
namespace {

constexpr size_t UDP_BYTES = 8;
constexpr size_t IPV4_BYTES = 20;
constexpr size_t IPV6_BYTES = 40;
constexpr size_t LRH_BYTES = 8;
constexpr uint8_t PROTOCOL_UDP = 17;
constexpr std::byte ONES{0xFF};

}  // namespace

std::string_view crc_by() { return SENNIT_ISAL ? "ISA-L" : "tables"; }

uint32_t extend(uint32_t crc, std::span<const std::byte> bytes) {
#if SENNIT_ISAL
  return crc32_gzip_refl(crc, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
#else
  return ~crc_register<CRC32_POLYNOMIAL>(~crc, bytes.data(), bytes.size());
#endif
}

uint32_t extend_with_header(uint32_t crc, std::span<const std::byte> header) {
  std::array<std::byte, DATA_HEADER_BYTES> masked;
  const size_t size_bytes = std::min(header.size(), masked.size());
  std::memcpy(masked.data(), header.data(), size_bytes);
  masked[4] = ONES;
  return extend(crc, std::span(masked).first(size_bytes));
}

NetworkCrc::NetworkCrc(const Endpoint& source, const Endpoint& destination, size_t common_packet_bytes)
    : source_(source), destination_(destination), common_packet_bytes_(common_packet_bytes) {
  for (uint32_t id = 0; id < (source.is_ipv6 ? 1 : IDENTIFICATION_COUNT); ++id)
    common_[id] = compute(common_packet_bytes, id);
}

uint32_t NetworkCrc::compute(size_t packet_bytes, uint32_t identification) const {
  std::array<std::byte, LRH_BYTES + IPV6_BYTES + UDP_BYTES> pseudo{};
  std::fill_n(pseudo.begin(), LRH_BYTES, ONES);
  std::byte* ip = pseudo.data() + LRH_BYTES;
  std::byte* udp;
  const auto udp_bytes = static_cast<uint16_t>(UDP_BYTES + packet_bytes);
  if (source_.is_ipv6) {
    store_be32(ip, 0x6FFF'FFFF);  // version 6; traffic class and flow label are masked
    store_be16(ip + 4, udp_bytes);
    ip[6] = std::byte{PROTOCOL_UDP};
    ip[7] = ONES;  // hop limit
    std::memcpy(ip + 8, source_.address.data(), 16);
    std::memcpy(ip + 24, destination_.address.data(), 16);
    udp = ip + IPV6_BYTES;
  } else {
    store_be16(ip, 0x45FF);  // version 4, five words, type of service masked
    store_be16(ip + 2, static_cast<uint16_t>(IPV4_BYTES + udp_bytes));
    store_be16(ip + 4, static_cast<uint16_t>(identification));
    store_be16(ip + 6, 0x4000);  // do not fragment
    ip[8] = ONES;                // time to live
    ip[9] = std::byte{PROTOCOL_UDP};
    store_be16(ip + 10, 0xFFFF);  // header checksum
    std::memcpy(ip + 12, source_.address.data(), 4);
    std::memcpy(ip + 16, destination_.address.data(), 4);
    udp = ip + IPV4_BYTES;
  }
  store_be16(udp, source_.port);
  store_be16(udp + 2, destination_.port);
  store_be16(udp + 4, udp_bytes);
  store_be16(udp + 6, 0xFFFF);  // checksum
  return extend(0, std::span(pseudo).first(static_cast<size_t>(udp - pseudo.data()) + UDP_BYTES));
}

size_t write_trailer(std::span<std::byte, 7> out, uint32_t crc, uint8_t pad_bytes) {
  std::fill_n(out.begin(), pad_bytes, std::byte{0});
  const uint32_t icrc = extend(crc, out.first(pad_bytes));
  std::memcpy(out.data() + pad_bytes, &icrc, ICRC_BYTES);
  return pad_bytes + ICRC_BYTES;
}

}  // namespace sennit::wire
