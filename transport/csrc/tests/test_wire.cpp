// SPDX-License-Identifier: Apache-2.0
// Packets compared with the golden vectors that Python reads too, and bytes that are no packets.
#include <arpa/inet.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "wire/icrc.hpp"
#include "wire/packet.hpp"

using namespace sennit::wire;

namespace {

// One line of tests/vectors/packets.json: a flat object of strings and small integers.
struct Vector {
  std::string line;

  std::string text(const std::string& key) const {
    const size_t at = line.find("\"" + key + "\": ");
    REQUIRE_MESSAGE(at != std::string::npos, key);
    size_t from = at + key.size() + 4;
    if (line[from] == '"') return line.substr(from + 1, line.find('"', from + 1) - from - 1);
    return line.substr(from, line.find_first_of(",}", from) - from);
  }
  uint64_t number(const std::string& key) const { return std::stoull(text(key), nullptr, 0); }
  std::vector<std::byte> bytes(const std::string& key) const {
    const std::string hex = text(key);
    std::vector<std::byte> out(hex.size() / 2);
    for (size_t i = 0; i < out.size(); ++i)
      out[i] = static_cast<std::byte>(std::stoi(hex.substr(2 * i, 2), nullptr, 16));
    return out;
  }
  Endpoint endpoint(const std::string& key) const {
    Endpoint end;
    end.is_ipv6 = text(key).find(':') != std::string::npos;
    REQUIRE(inet_pton(end.is_ipv6 ? AF_INET6 : AF_INET, text(key).c_str(), end.address.data()) == 1);
    end.port = static_cast<uint16_t>(number(key + "_port"));
    return end;
  }
};

std::vector<Vector> golden_packets() {
  std::ifstream file(SENNIT_VECTORS_DIR "/packets.json");
  REQUIRE(file.good());
  std::vector<Vector> vectors;
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("{")) vectors.push_back({line});
  REQUIRE(vectors.size() == 48);
  return vectors;
}

std::vector<std::byte> seal(const Vector& vector) {
  const auto payload = vector.bytes("payload");
  const auto qpn = static_cast<uint32_t>(vector.number("qpn")), psn = static_cast<uint32_t>(vector.number("psn"));
  std::vector<std::byte> out;
  if (vector.number("opcode") == static_cast<uint8_t>(Opcode::uc_send_only)) {
    out.resize(CONTROL_HEADER_BYTES);
    write_control_header(std::span<std::byte, CONTROL_HEADER_BYTES>(out), qpn, psn,
                         static_cast<uint32_t>(payload.size()));
  } else {
    out.resize(DATA_HEADER_BYTES);
    write_data_header(std::span<std::byte, DATA_HEADER_BYTES>(out), qpn, psn, vector.number("remote_address"),
                      static_cast<uint32_t>(vector.number("rkey")), static_cast<uint32_t>(vector.number("immediate")),
                      static_cast<uint32_t>(payload.size()));
  }
  const NetworkCrc network(vector.endpoint("source"), vector.endpoint("destination"),
                           data_packet_bytes(PAYLOAD_MAX_BYTES));
  const size_t packet_bytes = out.size() + payload.size() + pad_of(payload.size()) + ICRC_BYTES;
  uint32_t crc = network.of(packet_bytes, static_cast<uint32_t>(vector.number("identification")));
  crc = extend(extend_with_header(crc, out), payload);
  std::array<std::byte, 7> trailer;
  const size_t trailer_bytes = write_trailer(trailer, crc, pad_of(payload.size()));
  out.insert(out.end(), payload.begin(), payload.end());
  out.insert(out.end(), trailer.begin(), trailer.begin() + static_cast<std::ptrdiff_t>(trailer_bytes));
  return out;
}

}  // namespace

TEST_CASE("golden packets are written byte for byte") {
  for (const Vector& vector : golden_packets()) {
    CAPTURE(vector.text("name"));
    CHECK(seal(vector) == vector.bytes("datagram"));
  }
}

TEST_CASE("golden packets are read field by field") {
  for (const Vector& vector : golden_packets()) {
    CAPTURE(vector.text("name"));
    const auto datagram = vector.bytes("datagram"), payload = vector.bytes("payload");
    Packet packet;
    REQUIRE(parse(datagram, datagram.size(), packet) == Refusal::none);
    CHECK(static_cast<uint64_t>(packet.opcode) == vector.number("opcode"));
    CHECK(packet.qpn == vector.number("qpn"));
    CHECK(packet.psn == vector.number("psn"));
    CHECK(packet.remote_address == vector.number("remote_address"));
    CHECK(packet.rkey == vector.number("rkey"));
    CHECK(packet.immediate == vector.number("immediate"));
    CHECK(packet.payload_bytes == payload.size());
    CHECK(packet.pad_bytes == pad_of(payload.size()));
    CHECK(packet.icrc_offset() + ICRC_BYTES == datagram.size());
    CHECK(std::equal(payload.begin(), payload.end(), datagram.begin() + packet.payload_offset));
    const auto target = peek_target(datagram);
    REQUIRE(target.has_value() == (packet.opcode == Opcode::uc_write_only_immediate));
    if (!target) continue;
    CHECK(target->qpn == packet.qpn);
    CHECK(target->immediate == packet.immediate);
    CHECK_FALSE(peek_target(std::span(datagram).first(DATA_HEADER_BYTES - 1)).has_value());
  }
}

TEST_CASE("every truncated packet is refused, by its length or by the ICRC") {
  for (const Vector& vector : golden_packets()) {
    const auto datagram = vector.bytes("datagram");
    CAPTURE(vector.text("name"));
    for (size_t size_bytes = 0; size_bytes < datagram.size(); ++size_bytes) {
      // A copy of the exact size: the sanitizer build sees any read behind its end.
      const std::vector<std::byte> shorter(datagram.begin(),
                                           datagram.begin() + static_cast<std::ptrdiff_t>(size_bytes));
      Packet packet;
      const Refusal refusal = parse(shorter, shorter.size(), packet);
      if (refusal != Refusal::none) continue;
      // Only a SEND can still be well formed, because it carries no length.
      REQUIRE(packet.opcode == Opcode::uc_send_only);
      REQUIRE(packet.icrc_offset() + ICRC_BYTES == size_bytes);
      const NetworkCrc network(vector.endpoint("source"), vector.endpoint("destination"), 0);
      uint32_t crc = network.of(size_bytes, static_cast<uint32_t>(vector.number("identification")));
      crc = extend_with_header(crc, std::span(shorter).first(packet.header_bytes()));
      crc = extend(crc, std::span(shorter).subspan(packet.payload_offset, packet.payload_bytes + packet.pad_bytes));
      uint32_t found;
      std::memcpy(&found, shorter.data() + packet.icrc_offset(), sizeof found);
      REQUIRE(crc != found);
    }
  }
}

TEST_CASE("random bytes are a packet within bounds or a refusal with a name") {
  std::mt19937 random(4'791);
  for (int round = 0; round < 200'000; ++round) {
    std::vector<std::byte> noise(random() % 96);
    for (auto& byte : noise) byte = static_cast<std::byte>(random());
    if (noise.size() > 4 && random() % 8 != 0) {  // mostly past the first checks
      noise[0] = static_cast<std::byte>(random() % 2 ? 0x24 : 0x2B);
      noise[1] &= std::byte{0xF0};
      noise[2] = noise[3] = std::byte{0xFF};
    }
    Packet packet;
    const Refusal refusal = parse(noise, noise.size(), packet);
    if (refusal == Refusal::none) {
      REQUIRE(packet.icrc_offset() + ICRC_BYTES == noise.size());
    } else {
      REQUIRE(name(refusal) != "unknown");
    }
  }
}

TEST_CASE("each malformed field has its own refusal") {
  std::array<std::byte, DATA_HEADER_BYTES> header;
  const auto refusal_with = [&](size_t offset, uint8_t value) {
    write_data_header(header, 1, 2, 3, 4, 5, 8);
    header[offset] = static_cast<std::byte>(value);
    Packet packet;
    return parse(header, data_packet_bytes(8), packet);
  };
  CHECK(refusal_with(0, 0x2B) == Refusal::none);
  CHECK(refusal_with(0, 0x2A) == Refusal::bad_opcode);
  CHECK(refusal_with(0, 0x0B) == Refusal::bad_opcode);
  CHECK(refusal_with(1, 0x41) == Refusal::bad_version);
  CHECK(refusal_with(2, 0x12) == Refusal::bad_partition);
  CHECK(refusal_with(2, 0x7F) == Refusal::none);  // limited member
  CHECK(refusal_with(1, 0x70) == Refusal::bad_length);
  CHECK(refusal_with(27, 9) == Refusal::bad_length);
  CHECK(refusal_with(24, 0xFF) == Refusal::bad_length);
  write_data_header(header, 1, 2, 3, 4, 5, 0);
  Packet packet;
  header[1] |= std::byte{0x10};
  CHECK(parse(header, data_packet_bytes(0), packet) == Refusal::bad_pad);
  write_data_header(header, 1, 2, 3, 4, 5, 20'484);
  CHECK(parse(header, data_packet_bytes(20'484), packet) == Refusal::oversized);
  CHECK(parse(header, data_packet_bytes(4'101) - 1, packet) == Refusal::bad_pad);
}

TEST_CASE("an eager packet for a device is a send with an immediate, which no socket takes") {
  std::array<std::byte, SEND_IMMEDIATE_HEADER_BYTES> header;
  write_send_immediate_header(header, 0xABCDEF, 0x123456, 0x89ABCDEF, 5);
  constexpr uint8_t EXPECTED[] = {0x25, 0x40 | 3 << 4, 0xFF, 0xFF, 0,    0xAB, 0xCD, 0xEF,
                                  0,    0x12,          0x34, 0x56, 0x89, 0xAB, 0xCD, 0xEF};
  CHECK(std::memcmp(header.data(), EXPECTED, sizeof EXPECTED) == 0);
  CHECK(send_immediate_packet_bytes(5) == 16 + 8 + 4);
  Packet packet;
  CHECK(parse(header, send_immediate_packet_bytes(5), packet) == Refusal::bad_opcode);
}
