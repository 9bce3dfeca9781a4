// SPDX-License-Identifier: Apache-2.0
// huffman: bytes in a canonical prefix code whose codes have at most 11 bits, in four streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace sennit {

// Returns the bytes of the code of these n bytes, or 0 if the code saves less than max(8, n / 32) bytes. `to` has room
// for n bytes. What lies behind the code there may be written too.
uint64_t huffman_encode(std::span<const uint8_t> bytes, std::byte* to);

// Fills `bytes` from the begin of `coded`. Returns how much of it the code takes; 0 if it is malformed.
uint64_t huffman_decode(std::span<const std::byte> coded, std::span<uint8_t> bytes);

}  // namespace sennit
