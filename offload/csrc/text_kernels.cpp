// SPDX-License-Identifier: Apache-2.0
// The kernel of one instruction set. CMake compiles this file once for each and names it by SENNIT_ISA. A bit for each
// byte that ends a value, as in Langdale and Lemire, "Parsing gigabytes of JSON per second" (VLDB Journal 2019), 3.1.
#include "text_kernels.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#else
#include <cstring>
#endif

namespace sennit::offload::SENNIT_ISA {
namespace {

// Bit i: whether byte i of the block is `sign`.
#if defined(__AVX512BW__)
class Block {
 public:
  explicit Block(const char* at) : bytes_(_mm512_loadu_si512(at)) {}
  std::uint64_t equal(char sign) const { return _mm512_cmpeq_epi8_mask(bytes_, _mm512_set1_epi8(sign)); }

 private:
  __m512i bytes_;
};
#elif defined(__AVX2__)
class Block {
 public:
  explicit Block(const char* at) : low_(load(at)), high_(load(at + 32)) {}
  std::uint64_t equal(char sign) const { return part(low_, sign) | std::uint64_t{part(high_, sign)} << 32; }

 private:
  static __m256i load(const char* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
  static std::uint32_t part(__m256i bytes, char sign) {
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(sign))));
  }
  __m256i low_, high_;
};
#elif defined(__SSE2__)
class Block {
 public:
  explicit Block(const char* at) : at_(at) {}
  std::uint64_t equal(char sign) const {
    std::uint64_t bits = 0;
    for (int part = 0; part < 4; part++) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at_ + part * 16));
      const int found = _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(sign)));
      bits |= std::uint64_t{static_cast<std::uint32_t>(found)} << (part * 16);
    }
    return bits;
  }

 private:
  const char* at_;
};
#else
class Block {
 public:
  explicit Block(const char* at) : at_(at) {}
  std::uint64_t equal(char sign) const {
    constexpr std::uint64_t ONES = 0x0101010101010101, LOW = 0x7f7f7f7f7f7f7f7f;
    std::uint64_t bits = 0;
    for (int part = 0; part < 8; part++) {
      std::uint64_t word;
      std::memcpy(&word, at_ + part * 8, 8);
      word ^= ONES * static_cast<std::uint8_t>(sign);
      // The uppermost bit of each byte that is 0; those bits are then brought together.
      word = ~(((word & LOW) + LOW) | word | LOW);
      bits |= ((word >> 7) * 0x0102040810204080 >> 56) << (part * 8);
    }
    return bits;
  }

 private:
  const char* at_;
};
#endif

Cuts cut(const char* block, char delimiter, std::uint32_t first, std::uint32_t* ends) {
  constexpr std::uint64_t LAST = std::uint64_t{1} << 63;
  const Block bytes(block);
  const std::uint64_t newlines = bytes.equal('\n');
  std::uint64_t bits = newlines | bytes.equal(delimiter);
  const auto count = static_cast<std::size_t>(__builtin_popcountll(bits));
  // Eight at a time, because a branch for each would be a guess. What is behind the last one is written over.
  for (std::size_t found = 0; found < count; found += 8)
    for (std::size_t i = 0; i < 8; i++) {
      ends[found + i] = first + static_cast<std::uint32_t>(__builtin_ctzll(bits | LAST));
      bits &= bits - 1;
    }
  const std::uint64_t returns = bytes.equal('\r');
  return {.ends = count,
          .newlines = static_cast<std::size_t>(__builtin_popcountll(newlines)),
          .returns = returns == 0 ? 0 : static_cast<std::size_t>(__builtin_popcountll(returns))};
}

}  // namespace

const TextKernels TEXT_KERNELS{.cut = cut};

}  // namespace sennit::offload::SENNIT_ISA
