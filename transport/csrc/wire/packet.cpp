// SPDX-License-Identifier: Apache-2.0
#include "wire/packet.hpp"

#include <algorithm>

#include "wire/bytes.hpp"

namespace sennit::wire {
namespace {

// BTH byte 1: solicited event, MigReq, pad count (2 bits), transport version (4 bits). MigReq is set, because a queue
// pair starts in the state "migrated". Receivers without alternate paths ignore it.
constexpr uint8_t MIGRATED = 0x40;

void write_bth(std::byte* out, Opcode opcode, uint8_t pad_bytes, uint32_t qpn, uint32_t psn) {
  out[0] = static_cast<std::byte>(opcode);
  out[1] = static_cast<std::byte>(MIGRATED | (pad_bytes << 4));
  store_be16(out + 2, DEFAULT_PARTITION_KEY);
  store_be32(out + 4, qpn & QPN_MASK);  // FECN, BECN and reserved bits 0
  store_be32(out + 8, psn & PSN_MASK);  // AckReq 0: UC has no acknowledgements
}

}  // namespace

std::string_view name(Refusal refusal) {
  static constexpr std::array<std::string_view, static_cast<size_t>(Refusal::count)> NAMES = {
      "none",       "truncated",   "oversized", "bad_opcode", "bad_version", "bad_partition", "bad_pad",
      "bad_length", "unknown_qpn", "bad_key",   "bad_range",  "bad_slot",    "bad_icrc"};
  return refusal < Refusal::count ? NAMES[static_cast<size_t>(refusal)] : "unknown";
}

void write_data_header(std::span<std::byte, DATA_HEADER_BYTES> out, uint32_t qpn, uint32_t psn, uint64_t remote_address,
                       uint32_t rkey, uint32_t immediate, uint32_t payload_bytes) {
  write_bth(out.data(), Opcode::uc_write_only_immediate, pad_of(payload_bytes), qpn, psn);
  store_be64(out.data() + 12, remote_address);
  store_be32(out.data() + 20, rkey);
  store_be32(out.data() + 24, payload_bytes);
  store_be32(out.data() + 28, immediate);
}

void write_send_immediate_header(std::span<std::byte, SEND_IMMEDIATE_HEADER_BYTES> out, uint32_t qpn, uint32_t psn,
                                 uint32_t immediate, uint32_t payload_bytes) {
  write_bth(out.data(), Opcode::uc_send_only_immediate, pad_of(payload_bytes), qpn, psn);
  store_be32(out.data() + 12, immediate);
}

void write_control_header(std::span<std::byte, CONTROL_HEADER_BYTES> out, uint32_t qpn, uint32_t psn,
                          uint32_t payload_bytes) {
  write_bth(out.data(), Opcode::uc_send_only, pad_of(payload_bytes), qpn, psn);
}

uint32_t read_qpn(std::span<const std::byte, BTH_BYTES> bth) { return load_be32(bth.data() + 4) & QPN_MASK; }

Refusal parse(std::span<const std::byte> head, size_t packet_bytes, Packet& out) {
  const size_t known_bytes = std::min(head.size(), packet_bytes);
  if (known_bytes < BTH_BYTES || packet_bytes < BTH_BYTES + ICRC_BYTES) return Refusal::truncated;
  const std::byte* bth = head.data();
  const auto opcode = static_cast<Opcode>(bth[0]);
  if (opcode != Opcode::uc_write_only_immediate && opcode != Opcode::uc_send_only) return Refusal::bad_opcode;
  const auto flags = static_cast<uint8_t>(bth[1]);
  if ((flags & 0x0F) != 0) return Refusal::bad_version;
  // The top bit of a partition key says full or limited member. Both may talk to us.
  if ((load_be16(bth + 2) & 0x7FFF) != (DEFAULT_PARTITION_KEY & 0x7FFF)) return Refusal::bad_partition;

  const bool is_data = opcode == Opcode::uc_write_only_immediate;
  const size_t header_bytes = is_data ? DATA_HEADER_BYTES : CONTROL_HEADER_BYTES;
  if (known_bytes < header_bytes || packet_bytes < header_bytes + ICRC_BYTES) return Refusal::truncated;
  const size_t padded_bytes = packet_bytes - header_bytes - ICRC_BYTES;
  const uint8_t pad_bytes = (flags >> 4) & 3;
  if (padded_bytes % 4 != 0 || pad_bytes > padded_bytes) return Refusal::bad_pad;
  const size_t payload_bytes = padded_bytes - pad_bytes;
  if (payload_bytes > LOCAL_PAYLOAD_MAX_BYTES) return Refusal::oversized;

  out.opcode = opcode;
  out.pad_bytes = pad_bytes;
  out.qpn = read_qpn(head.first<BTH_BYTES>());
  out.psn = load_be32(bth + 8) & PSN_MASK;
  out.payload_offset = static_cast<uint32_t>(header_bytes);
  out.payload_bytes = static_cast<uint32_t>(payload_bytes);
  out.remote_address = is_data ? load_be64(bth + 12) : 0;
  out.rkey = is_data ? load_be32(bth + 20) : 0;
  out.immediate = is_data ? load_be32(bth + 28) : 0;
  if (is_data && load_be32(bth + 24) != payload_bytes) return Refusal::bad_length;
  return Refusal::none;
}

std::optional<DataTarget> peek_target(std::span<const std::byte> head) {
  if (head.size() < DATA_HEADER_BYTES || static_cast<Opcode>(head[0]) != Opcode::uc_write_only_immediate) return {};
  return DataTarget{load_be32(head.data() + 4) & QPN_MASK, load_be32(head.data() + 28)};
}

}  // namespace sennit::wire
