// SPDX-License-Identifier: Apache-2.0
// Philox4x32-7 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), many counters at
// once. Seven rounds are the fewest that pass BigCrush. The ten of the embedding tables would take a third more time.
#pragma once

#include <cstdint>
#include <cstring>

#include "codec/kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sennit::SENNIT_CODEC_VARIANT {

#if defined(__AVX512F__)
inline constexpr int WIDTH_BYTES = 64;
#elif defined(__AVX2__)
inline constexpr int WIDTH_BYTES = 32;
#else
inline constexpr int WIDTH_BYTES = 16;
#endif
inline constexpr int LANES = WIDTH_BYTES / 8;
// A 32-bit word of a counter a lane. What is above it in the lane does not matter.
typedef uint64_t Lanes __attribute__((vector_size(WIDTH_BYTES)));

// The products of the low halves of the lanes.
inline Lanes product(Lanes word, uint32_t factor) {
#if defined(__AVX512F__)
  // (GCC 12 warns of an uninitialized operand inside of _mm512_mul_epu32.)
  return reinterpret_cast<Lanes>(
      _mm512_maskz_mul_epu32(0xFF, reinterpret_cast<__m512i>(word), _mm512_set1_epi64(factor)));
#elif defined(__AVX2__)
  return reinterpret_cast<Lanes>(_mm256_mul_epu32(reinterpret_cast<__m256i>(word), _mm256_set1_epi64x(factor)));
#elif defined(__x86_64__)
  return reinterpret_cast<Lanes>(_mm_mul_epu32(reinterpret_cast<__m128i>(word), _mm_set1_epi64x(factor)));
#else
  return (word & 0xFFFFFFFFu) * factor;
#endif
}

// Words 0 and 1 of the key are the seed, low word first; words 0 and 1 of a counter its number, 2 is 0, and 3 keeps the
// stream apart from others of the same seed.
inline constexpr uint32_t CODEC_STREAM = 0x636F6465;  // "code"

// Lanes of both in turn: of each counter the words 0 and 1, then 2 and 3.
inline void store_in_turn(Lanes first, Lanes second, uint16_t* to) {
#if defined(__AVX512F__)
  const Lanes low = __builtin_shufflevector(first, second, 0, 8, 1, 9, 2, 10, 3, 11);
  const Lanes high = __builtin_shufflevector(first, second, 4, 12, 5, 13, 6, 14, 7, 15);
#elif defined(__AVX2__)
  const Lanes low = __builtin_shufflevector(first, second, 0, 4, 1, 5);
  const Lanes high = __builtin_shufflevector(first, second, 2, 6, 3, 7);
#else
  const Lanes low = __builtin_shufflevector(first, second, 0, 2);
  const Lanes high = __builtin_shufflevector(first, second, 1, 3);
#endif
  std::memcpy(to, &low, sizeof low);
  std::memcpy(to + 4 * LANES, &high, sizeof high);
}

inline void fill_random(uint64_t seed, uint64_t counter, uint64_t counters, uint16_t* random) {
  // A round waits for the products of the one before. So several vectors of counters are on the way.
  constexpr int VECTORS = 2;
  static_assert(RANDOM_GROUP % (VECTORS * LANES) == 0);
  constexpr int ROUNDS = 7;
  Lanes keys[2][ROUNDS];
  for (int round = 0; round < ROUNDS; ++round) {
    const auto number = static_cast<uint32_t>(round);
    keys[0][round] = Lanes{} + (static_cast<uint32_t>(seed) + number * 0x9E3779B9u);
    keys[1][round] = Lanes{} + (static_cast<uint32_t>(seed >> 32) + number * 0xBB67AE85u);
  }
  Lanes numbers{};
  for (int lane = 0; lane < LANES; ++lane) numbers[lane] = counter + static_cast<uint64_t>(lane);
  for (uint64_t done = 0; done < counters; done += VECTORS * LANES) {
    Lanes c0[VECTORS], c1[VECTORS], c2[VECTORS], c3[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      c0[v] = numbers;
      numbers += LANES;
      c1[v] = c0[v] >> 32;
      c2[v] = Lanes{};
      c3[v] = Lanes{} + CODEC_STREAM;
    }
    for (int round = 0; round < ROUNDS; ++round) {
      for (int v = 0; v < VECTORS; ++v) {
        const Lanes first = product(c0[v], 0xD2511F53u), second = product(c2[v], 0xCD9E8D57u);
        c0[v] = (second >> 32) ^ c1[v] ^ keys[0][round];
        c1[v] = second;
        c2[v] = (first >> 32) ^ c3[v] ^ keys[1][round];
        c3[v] = first;
      }
    }
    for (int v = 0; v < VECTORS; ++v) {
      const Lanes first = (c0[v] & 0xFFFFFFFFu) | c1[v] << 32, second = (c2[v] & 0xFFFFFFFFu) | c3[v] << 32;
      store_in_turn(first, second, random + 8 * (done + static_cast<uint64_t>(v * LANES)));
    }
  }
}

}  // namespace sennit::SENNIT_CODEC_VARIANT
