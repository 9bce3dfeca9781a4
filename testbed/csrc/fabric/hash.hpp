// SPDX-License-Identifier: Apache-2.0
// SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014), in place of a switch's CRC over the 5-tuple.
#pragma once
#include <cstdint>

namespace sennit::fabric {

constexpr uint64_t mix(uint64_t value) {
  value += 0x9E37'79B9'7F4A'7C15;
  value = (value ^ value >> 30) * 0xBF58'476D'1CE4'E5B9;
  value = (value ^ value >> 27) * 0x94D0'49BB'1331'11EB;
  return value ^ value >> 31;
}
constexpr uint64_t mix(uint64_t first, uint64_t second) { return mix(mix(first) ^ second); }

}  // namespace sennit::fabric
