// SPDX-License-Identifier: Apache-2.0
// The arithmetic of XXH64 (Collet, doc/xxhash_spec.md of github.com/Cyan4973/xxHash), for BPF programs and for the
// native core alike. Plain C, no loops: those differ, because the verifier wants to see every bound.
// docs/decisions/0065-a-checksum-in-every-packet.md says why this one.
#pragma once

#include <linux/types.h>

#define CHECKSUM static inline __attribute__((always_inline))
#define CHECKSUM_PRIME_1 0x9e3779b185ebca87ull
#define CHECKSUM_PRIME_2 0xc2b2ae3d27d4eb4full
#define CHECKSUM_PRIME_3 0x165667b19e3779f9ull
#define CHECKSUM_PRIME_4 0x85ebca77c2b2ae63ull
#define CHECKSUM_PRIME_5 0x27d4eb2f165667c5ull
// The sums of the words 0, 4, 8 …, 1, 5, 9 … and so on begin with these.
#define CHECKSUM_SUM_0 (CHECKSUM_PRIME_1 + CHECKSUM_PRIME_2)
#define CHECKSUM_SUM_1 CHECKSUM_PRIME_2
#define CHECKSUM_SUM_2 0ull
#define CHECKSUM_SUM_3 (0 - CHECKSUM_PRIME_1)
#define CHECKSUM_STRIPE_BYTES 32

CHECKSUM __u64 checksum_rotate(__u64 number, int bits) { return number << bits | number >> (64 - bits); }

// Adds a word of 8 bytes, little-endian, to one of the four sums.
CHECKSUM __u64 checksum_word(__u64 sum, __u64 word) {
  return checksum_rotate(sum + word * CHECKSUM_PRIME_2, 31) * CHECKSUM_PRIME_1;
}

CHECKSUM __u64 checksum_merge(__u64 all, __u64 sum) {
  return (all ^ checksum_word(0, sum)) * CHECKSUM_PRIME_1 + CHECKSUM_PRIME_4;
}

CHECKSUM __u64 checksum_join(__u64 a, __u64 b, __u64 c, __u64 d, __u64 bytes) {
  __u64 all = checksum_rotate(a, 1) + checksum_rotate(b, 7) + checksum_rotate(c, 12) + checksum_rotate(d, 18);
  all = checksum_merge(all, a);
  all = checksum_merge(all, b);
  all = checksum_merge(all, c);
  return checksum_merge(all, d) + bytes;
}

// What is behind the last whole stripe: words, then at most one half, then bytes.
CHECKSUM __u64 checksum_tail_word(__u64 all, __u64 word) {
  return checksum_rotate(all ^ checksum_word(0, word), 27) * CHECKSUM_PRIME_1 + CHECKSUM_PRIME_4;
}

CHECKSUM __u64 checksum_tail_half(__u64 all, __u32 half) {
  return checksum_rotate(all ^ half * CHECKSUM_PRIME_1, 23) * CHECKSUM_PRIME_2 + CHECKSUM_PRIME_3;
}

CHECKSUM __u64 checksum_tail_byte(__u64 all, __u8 byte) {
  return checksum_rotate(all ^ byte * CHECKSUM_PRIME_5, 11) * CHECKSUM_PRIME_1;
}

CHECKSUM __u64 checksum_end(__u64 all) {
  all = (all ^ all >> 33) * CHECKSUM_PRIME_2;
  all = (all ^ all >> 29) * CHECKSUM_PRIME_3;
  return all ^ all >> 32;
}
