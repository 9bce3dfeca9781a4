// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: any bytes are either refused by name or give a packet that lies within them.
#include <cstdlib>
#include <vector>

#include "wire/icrc.hpp"
#include "wire/packet.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sennit::wire;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  Packet packet;
  if (const Refusal refusal = parse(bytes, size, packet); refusal != Refusal::none) {
    if (name(refusal) == "unknown") std::abort();
    return 0;
  }
  if (packet.icrc_offset() + ICRC_BYTES != size || packet.payload_bytes > PAYLOAD_MAX_BYTES) std::abort();
  // The parsed headers must write the same bytes again, except for the bits that a receiver ignores.
  if (packet.opcode == Opcode::uc_write_only_immediate) {
    std::array<std::byte, DATA_HEADER_BYTES> header;
    write_data_header(header, packet.qpn, packet.psn, packet.remote_address, packet.rkey, packet.immediate,
                      packet.payload_bytes);
    Packet again;
    if (parse(header, size, again) != Refusal::none) std::abort();
  }
  const NetworkCrc network(Endpoint{}, Endpoint{}, 0);
  uint32_t crc = extend_with_header(network.of(size, 0), bytes.first(packet.header_bytes()));
  crc = extend(crc, bytes.subspan(packet.payload_offset, packet.payload_bytes + packet.pad_bytes));
  // The parser does not check the ICRC. These reads let the address sanitizer watch all bytes under it.
  asm volatile("" : : "r"(crc));  // keeps the compiler from removing the reads
  return 0;
}
