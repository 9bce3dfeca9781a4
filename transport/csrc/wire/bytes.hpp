// SPDX-License-Identifier: Apache-2.0
// Integers in network byte order at any alignment.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sennit::wire {

static_assert(std::endian::native == std::endian::little, "sennit runs on little-endian machines");

inline uint16_t load_be16(const std::byte* from) {
  uint16_t value;
  std::memcpy(&value, from, sizeof value);
  return __builtin_bswap16(value);
}
inline uint32_t load_be32(const std::byte* from) {
  uint32_t value;
  std::memcpy(&value, from, sizeof value);
  return __builtin_bswap32(value);
}
inline uint64_t load_be64(const std::byte* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return __builtin_bswap64(value);
}
inline void store_be16(std::byte* to, uint16_t value) {
  value = __builtin_bswap16(value);
  std::memcpy(to, &value, sizeof value);
}
inline void store_be32(std::byte* to, uint32_t value) {
  value = __builtin_bswap32(value);
  std::memcpy(to, &value, sizeof value);
}
inline void store_be64(std::byte* to, uint64_t value) {
  value = __builtin_bswap64(value);
  std::memcpy(to, &value, sizeof value);
}

}  // namespace sennit::wire
