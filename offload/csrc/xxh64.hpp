// SPDX-License-Identifier: Apache-2.0
// XXH64 with seed 0 (Collet, doc/xxhash_spec.md of github.com/Cyan4973/xxHash).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../../ebpf/include/checksum.h"

namespace sennit::offload {

template <typename Number>
Number read_word(const char*& at) {
  Number word;
  std::memcpy(&word, at, sizeof word);
  at += sizeof word;
  return word;
}

// What is behind the last whole stripe, and the end of the hash. `all`: the hash of what is before.
inline std::uint64_t xxh64_tail(std::uint64_t all, const char* at, const char* end) {
  while (end - at >= 8) all = checksum_tail_word(all, read_word<std::uint64_t>(at));
  if (end - at >= 4) all = checksum_tail_half(all, read_word<std::uint32_t>(at));
  while (at < end) all = checksum_tail_byte(all, static_cast<std::uint8_t>(*at++));
  return checksum_end(all);
}

// The four sums over whole stripes.
struct Xxh64Sums {
  std::uint64_t a = CHECKSUM_SUM_0, b = CHECKSUM_SUM_1, c = CHECKSUM_SUM_2, d = CHECKSUM_SUM_3;

  void add(const char*& at) {
    a = checksum_word(a, read_word<std::uint64_t>(at));
    b = checksum_word(b, read_word<std::uint64_t>(at));
    c = checksum_word(c, read_word<std::uint64_t>(at));
    d = checksum_word(d, read_word<std::uint64_t>(at));
  }
  std::uint64_t join(std::size_t bytes) const { return checksum_join(a, b, c, d, bytes); }
};

// Of 8 bytes: the digits of 32 bits, as click logs have them.
inline std::uint64_t xxh64_of_8(const char* at) {
  return checksum_end(checksum_tail_word(CHECKSUM_PRIME_5 + 8, read_word<std::uint64_t>(at)));
}

inline std::uint64_t xxh64(const char* at, std::size_t bytes) {
  const char* const end = at + bytes;
  // Section "XXH64 algorithm description", step 1: fewer bytes than a stripe.
  if (bytes < CHECKSUM_STRIPE_BYTES) return xxh64_tail(CHECKSUM_PRIME_5 + bytes, at, end);
  Xxh64Sums sums;
  while (end - at >= CHECKSUM_STRIPE_BYTES) sums.add(at);
  return xxh64_tail(sums.join(bytes), at, end);
}

}  // namespace sennit::offload
