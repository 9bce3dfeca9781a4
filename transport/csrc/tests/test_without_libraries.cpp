// SPDX-License-Identifier: Apache-2.0
// What stands in for ISA-L and for the verbs port. The golden packets of test_wire.cpp are in this program, too.
#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

#include "ports/verbs/device_port.hpp"
#include "sennit/crc32.hpp"
#include "wire/icrc.hpp"

namespace {

// A bit at a time, as the standards define it.
uint32_t by_bits(uint32_t polynomial, uint32_t crc, std::span<const std::byte> bytes) {
  for (const std::byte byte : bytes) {
    crc ^= static_cast<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? crc >> 1 ^ polynomial : crc >> 1;
  }
  return crc;
}

}  // namespace

TEST_CASE("tables give the check values of both polynomials") {
  using namespace sennit::wire;
  const std::string digits = "123456789";
  CHECK(~crc_register<CRC32_POLYNOMIAL>(~0u, digits.data(), digits.size()) == 0xCBF4'3926);   // ITU-T V.42
  CHECK(~crc_register<CRC32C_POLYNOMIAL>(~0u, digits.data(), digits.size()) == 0xE306'9283);  // RFC 3720, B.4
}

TEST_CASE("tables agree with single bits, at every length and alignment, and chain") {
  using namespace sennit::wire;
  std::mt19937 random(1);
  std::vector<std::byte> bytes(80);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (size_t first = 0; first < 9; ++first)
    for (size_t size = 0; first + size <= bytes.size(); ++size) {
      const auto part = std::span(bytes).subspan(first, size);
      const uint32_t start = static_cast<uint32_t>(random());
      REQUIRE(crc_register<CRC32C_POLYNOMIAL>(start, part.data(), size) == by_bits(CRC32C_POLYNOMIAL, start, part));
      REQUIRE(extend(0, part) == ~by_bits(CRC32_POLYNOMIAL, ~0u, part));
      const size_t cut = size / 3;
      REQUIRE(extend(extend(0, part.first(cut)), part.subspan(cut)) == extend(0, part));
    }
  CHECK(crc_by() == "tables");
}

TEST_CASE("a build without the verbs port says what it did not find") {
  CHECK(!sennit::has_verbs());
  CHECK_THROWS_WITH_AS(sennit::open_verbs(0, 2, {}), doctest::Contains("Debian: libibverbs-dev"), std::runtime_error);
  CHECK_THROWS_WITH_AS(sennit::list_device_ports(), doctest::Contains("infiniband/verbs.h"), std::runtime_error);
}
