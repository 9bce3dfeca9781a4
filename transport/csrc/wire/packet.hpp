// SPDX-License-Identifier: Apache-2.0
// RoCEv2 packets of the unreliable connected (UC) service: two that sennit sends and accepts, and one for devices only.
//
//   data     RDMA WRITE ONLY with immediate   BTH | RETH | ImmDt | payload | pad | ICRC
//   control  SEND ONLY                        BTH | payload | pad | ICRC
//   eager    SEND ONLY with immediate         BTH | ImmDt | payload | pad | ICRC      to a device only
//
// IBTA architecture specification, volume 1: 9.2 (BTH), 9.3.3 (RETH), 9.3.6 (ImmDt), 9.2.2 (pad count), annex A17
// (RoCEv2). Byte tables: docs/reference/wire.md. A packet is parsed from its first bytes and its size alone, so the
// payload may lie anywhere.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace sennit::wire {

inline constexpr size_t BTH_BYTES = 12;
inline constexpr size_t RETH_BYTES = 16;
inline constexpr size_t IMMDT_BYTES = 4;
inline constexpr size_t ICRC_BYTES = 4;
inline constexpr size_t DATA_HEADER_BYTES = BTH_BYTES + RETH_BYTES + IMMDT_BYTES;
inline constexpr size_t CONTROL_HEADER_BYTES = BTH_BYTES;
inline constexpr size_t SEND_IMMEDIATE_HEADER_BYTES = BTH_BYTES + IMMDT_BYTES;
inline constexpr size_t PAYLOAD_MAX_BYTES = 4'096;  // the largest path MTU of IBTA
// Between two sockets of one address, whose packets no device sees. Three fill one send, as 15 of the others do. With
// larger ones a window would hold fewer packets than there are slots for eager messages.
inline constexpr size_t LOCAL_PAYLOAD_MAX_BYTES = 5 * PAYLOAD_MAX_BYTES;
inline constexpr size_t PACKET_MAX_BYTES = DATA_HEADER_BYTES + PAYLOAD_MAX_BYTES + ICRC_BYTES;
inline constexpr uint16_t ROCE_UDP_PORT = 4'791;      // IANA "roce-v2"
inline constexpr uint16_t ENTROPY_PORT_MIN = 0xC000;  // A17.4.3.2: source port range of RoCEv2
inline constexpr uint16_t DEFAULT_PARTITION_KEY = 0xFFFF;
inline constexpr uint32_t QPN_MASK = 0xFF'FFFF;
inline constexpr uint32_t PSN_MASK = 0xFF'FFFF;

enum class Opcode : uint8_t {
  uc_send_only = 0x24,
  uc_send_only_immediate = 0x25,
  uc_write_only_immediate = 0x2B,
};

// Why a packet was dropped. Each reason is a counter of the port, under `name(refusal)`.
enum class Refusal : uint8_t {
  none,
  truncated,      // shorter than its headers
  oversized,      // payload longer than the largest path MTU
  bad_opcode,     // neither data nor control
  bad_version,    // BTH transport version is not 0
  bad_partition,  // not the default partition
  bad_pad,        // the pad count does not fill up to a multiple of four
  bad_length,     // RETH's DMA length is not the payload's
  unknown_qpn,    // the queue pair of none of our paths
  bad_key,        // rkey does not open the region
  bad_range,      // address outside the region, or outside what is expected
  bad_slot,       // the immediate names nothing that is expected
  bad_icrc,       // damaged, or not from the peer's address
  count,
};

std::string_view name(Refusal refusal);

struct Packet {
  Opcode opcode;
  uint8_t pad_bytes;
  uint32_t qpn;             // destination queue pair number, 24 bits
  uint32_t psn;             // 24 bits
  uint64_t remote_address;  // data only
  uint32_t rkey;            // data only
  uint32_t immediate;       // data only
  uint32_t payload_offset;
  uint32_t payload_bytes;

  size_t header_bytes() const { return payload_offset; }
  size_t icrc_offset() const { return payload_offset + payload_bytes + pad_bytes; }
};

constexpr uint8_t pad_of(size_t payload_bytes) { return static_cast<uint8_t>((0 - payload_bytes) & 3); }
constexpr size_t data_packet_bytes(size_t payload_bytes) {
  return DATA_HEADER_BYTES + payload_bytes + pad_of(payload_bytes) + ICRC_BYTES;
}
constexpr size_t send_immediate_packet_bytes(size_t payload_bytes) {
  return SEND_IMMEDIATE_HEADER_BYTES + payload_bytes + pad_of(payload_bytes) + ICRC_BYTES;
}
constexpr size_t control_packet_bytes(size_t payload_bytes) {
  return CONTROL_HEADER_BYTES + payload_bytes + pad_of(payload_bytes) + ICRC_BYTES;
}

// Writes only the headers. The sender gathers [header][payload][pad and ICRC].
void write_data_header(std::span<std::byte, DATA_HEADER_BYTES> out, uint32_t qpn, uint32_t psn, uint64_t remote_address,
                       uint32_t rkey, uint32_t immediate, uint32_t payload_bytes);
void write_send_immediate_header(std::span<std::byte, SEND_IMMEDIATE_HEADER_BYTES> out, uint32_t qpn, uint32_t psn,
                                 uint32_t immediate, uint32_t payload_bytes);
void write_control_header(std::span<std::byte, CONTROL_HEADER_BYTES> out, uint32_t qpn, uint32_t psn,
                          uint32_t payload_bytes);

// The destination queue pair of a header that may otherwise be invalid.
uint32_t read_qpn(std::span<const std::byte, BTH_BYTES> bth);

// Reads the headers of a packet of `packet_bytes` bytes (UDP payload, ICRC included) whose first bytes are
// `head`: at least min(packet_bytes, DATA_HEADER_BYTES) of them. Does not look at the ICRC.
[[nodiscard]] Refusal parse(std::span<const std::byte> head, size_t packet_bytes, Packet& out);

// A hint from the first bytes of a data packet: its queue pair and place. Nothing is checked. None for other packets.
struct DataTarget {
  uint32_t qpn, immediate;
};
std::optional<DataTarget> peek_target(std::span<const std::byte> head);

}  // namespace sennit::wire
