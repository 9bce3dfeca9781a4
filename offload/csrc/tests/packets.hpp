// SPDX-License-Identifier: Apache-2.0
// Packets written by hand, for tests of their readers.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "checksum.hpp"
#include "receiver.hpp"

namespace sennit::offload {

using Bytes = std::vector<std::uint8_t>;

inline void append_big_endian(Bytes& to, std::uint64_t number, int width_bytes) {
  for (int shift = 8 * (width_bytes - 1); shift >= 0; shift -= 8)
    to.push_back(static_cast<std::uint8_t>(number >> shift));
}

// The packet with its right checksum.
inline Bytes sealed(Bytes packet) {
  const std::uint64_t checksum = checksum_of(packet);
  for (std::size_t n = 0; n < 8; n++) packet[CHECKSUM_AT + n] = static_cast<std::uint8_t>(checksum >> (56 - 8 * n));
  return packet;
}

struct Header {
  std::uint16_t magic = 0x5e17;
  std::uint8_t version = 2, flags = 0;
  std::uint32_t schema_id = 7, session = 9, batch = 0, row = 0;
  std::uint16_t records = 1;
};

inline Bytes packet(const Header& header, const Bytes& body) {
  Bytes made;
  append_big_endian(made, header.magic, 2);
  made.push_back(header.version);
  made.push_back(header.flags);
  for (const std::uint32_t word : {header.schema_id, header.session, header.batch, header.row})
    append_big_endian(made, word, 4);
  append_big_endian(made, header.records, 2);
  append_big_endian(made, body.size(), 2);
  append_big_endian(made, 0, 8);
  made.insert(made.end(), body.begin(), body.end());
  return sealed(std::move(made));
}

// A float32, a bfloat16, two ids of two bytes, a list of up to 300 ids of one byte, and one of up to 3 of eight.
inline RecordSchema big_endian_schema() {
  return {.is_big_endian = true,
          .is_label_float = false,
          .dense = {{.is_bfloat16 = false}, {.is_bfloat16 = true}},
          .ids = {{.width_bytes = 2, .is_signed = true, .length = 2},
                  {.width_bytes = 1, .length = 300, .is_list = true},
                  {.width_bytes = 8, .length = 3, .is_list = true}}};
}

// A record of that schema: label 1, 1.5, -2.0, {first, -1}, `many` times 255, and {first}.
inline Bytes record(std::int16_t first, std::uint16_t many) {
  Bytes made{5};  // a label that is not 0 is 1
  append_big_endian(made, 0x3fc00000, 4);
  append_big_endian(made, 0xc000, 2);
  append_big_endian(made, static_cast<std::uint16_t>(first), 2);
  append_big_endian(made, 0xffff, 2);
  append_big_endian(made, many, 2);
  made.push_back(1);
  made.insert(made.end(), many, 255);
  append_big_endian(made, static_cast<std::uint64_t>(std::int64_t{first}), 8);
  return made;
}

inline Bytes joined(const std::vector<Bytes>& parts) {
  Bytes made;
  for (const Bytes& part : parts) made.insert(made.end(), part.begin(), part.end());
  return made;
}

}  // namespace sennit::offload
