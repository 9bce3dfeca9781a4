// SPDX-License-Identifier: Apache-2.0
// The codec kernels of one instruction set. CMake compiles this file once for each set and names it by
// SENNIT_CODEC_VARIANT. The kernels are plain loops that the compiler vectorises. All variants give the same bits.
//
// No denormal float32 takes part in any addition or product, so that the processor's modes FTZ and DAZ change nothing.
#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "codec/kernels.hpp"
#include "codec/philox.hpp"

namespace sennit::SENNIT_CODEC_VARIANT {
namespace {

// Bits of float32.
constexpr uint32_t SIGN = 0x80000000u;
constexpr uint32_t MAGNITUDE = 0x7FFFFFFFu;
constexpr uint32_t INF = 0x7F800000u;
constexpr uint32_t QUIET_NAN = 0x7FC00000u;
constexpr uint32_t LEAST_NORMAL = 0x00800000u;

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
constexpr uint32_t power_of_two(int exponent) { return static_cast<uint32_t>(127 + exponent) << 23; }
// Signed comparisons: SSE2 and AVX2 have no others.
uint32_t smaller(uint32_t a, uint32_t b) { return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? a : b; }
uint32_t greater(uint32_t a, uint32_t b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b; }

// The offset of stochastic rounding to nearest, from `drawn` bits: odd / 2^(drawn + 1) of `unit`, between -1/2 and 1/2.
template <int drawn>
float dither(uint16_t random, uint32_t unit_bits) {
  const auto odd = static_cast<float>(2 * static_cast<int32_t>(random >> (16 - drawn)) - ((1 << drawn) - 1));
  return odd * float_of(unit_bits - (static_cast<uint32_t>(drawn + 1) << 23));
}

// A float of a sign, some bits of exponent and MANTISSA bits of mantissa. LARGEST is its largest finite number.
template <int mantissa, int bias, int sign_bit, uint32_t infinity_code, uint32_t nan_code, uint32_t largest>
struct Minifloat {
  static constexpr int DROPPED = 23 - mantissa;
  static constexpr int SIGN_BIT = sign_bit;
  static constexpr uint32_t SIGN_CODE = 1u << sign_bit;
  static constexpr uint32_t LARGEST = largest;
  static constexpr uint32_t WHOLE_STEPS = 0x7FFFFFu & ~((1u << DROPPED) - 1);
  static constexpr int LARGEST_EXPONENT = static_cast<int>(largest >> 23) - 127;
  static constexpr uint32_t LEAST_EXPONENT = power_of_two(1 - bias);
  // 2^-126, the step of the least scale, is the step of the least code.
  static constexpr int LEAST_SCALE = bias + mantissa;
  // No more bits than float32 has below a step, so that a number of the format stays what it is.
  static constexpr int DRAWN = std::min(16, DROPPED - 1);

  // `element` is a number's bits, and `value` the number, as a multiple of its block's power of two. An easy element is
  // known to be finite and at most `limit`.
  template <bool stochastic, bool easy>
  static uint32_t code(uint32_t element, float value, uint16_t random, uint32_t limit = LARGEST) {
    const uint32_t scaled = bits_of(value) & MAGNITUDE;
    const float y = float_of(easy ? scaled : smaller(scaled, limit));
    const uint32_t exponent = greater(bits_of(y) & INF, LEAST_EXPONENT);
    // In 1.5 * 2^(e + DROPPED) the last bit is worth a step of the format. So the addition rounds, and its last bits
    // are the number of steps.
    const uint32_t magic = exponent + ((static_cast<uint32_t>(DROPPED) << 23) | 0x400000u);
    float moved = y;
    if constexpr (stochastic) moved = y + dither<DRAWN>(random, exponent - (static_cast<uint32_t>(mantissa) << 23));
    const uint32_t steps = bits_of(moved + float_of(magic)) - magic;
    uint32_t found = ((exponent - LEAST_EXPONENT) >> DROPPED) + steps;
    if constexpr (infinity_code != 0 && !easy) {
      const auto magnitude = static_cast<int32_t>(element & MAGNITUDE);
      found = magnitude >= static_cast<int32_t>(INF) ? infinity_code : found;
      found = magnitude > static_cast<int32_t>(INF) ? nan_code : found;
    }
    return found | ((element >> (31 - sign_bit)) & SIGN_CODE);
  }

  static float value(uint32_t code, float scale) {
    const uint32_t magnitude = code & (SIGN_CODE - 1);
    // With code 0 of the exponent, a number has no leading one. It is computed with the leading one of the exponent
    // below, doubled, and the leading one is then subtracted.
    const uint32_t normal = (magnitude << DROPPED) + power_of_two(-bias);
    const float subnormal = float_of(normal + LEAST_NORMAL) - float_of(LEAST_EXPONENT);
    uint32_t found = bits_of((magnitude < (1u << mantissa) ? subnormal : float_of(normal)) * scale);
    if constexpr (infinity_code != 0) {
      found = magnitude >= infinity_code ? INF : found;
      found = magnitude > infinity_code ? QUIET_NAN : found;
    }
    return float_of(found | (code & SIGN_CODE) << (31 - sign_bit));
  }
};

// IEEE 754 binary16.
using Fp16 = Minifloat<10, 15, 15, 0x7C00, 0x7E00, 0x477FE000u>;
// OCP OFP8, except that E4M3 gives the code of 448 to infinity, so that its largest number is 416.
using E4M3 = Minifloat<3, 7, 7, 0x7E, 0x7F, 0x43D00000u>;
using E5M2 = Minifloat<2, 15, 7, 0x7C, 0x7E, 0x47600000u>;
// OCP MX: it has neither infinity nor NaN.
using E2M1 = Minifloat<1, 1, 3, 0, 0, 0x40C00000u>;

struct BFloat16 {
  template <bool stochastic, bool>
  static uint32_t code(uint32_t element, float, uint16_t random) {
    const uint32_t magnitude = element & MAGNITUDE;
    const uint32_t moved = magnitude + (stochastic ? random : 0x7FFFu + ((magnitude >> 16) & 1u));
    uint32_t found = smaller(moved >> 16, 0x7F7Fu);
    found = static_cast<int32_t>(magnitude) >= static_cast<int32_t>(INF) ? 0x7F80u : found;
    found = static_cast<int32_t>(magnitude) > static_cast<int32_t>(INF) ? 0x7FC0u : found;
    return found | ((element & SIGN) >> 16);
  }
  static float value(uint32_t code, float) {
    const uint32_t bits = code << 16;
    return float_of((bits & MAGNITUDE) > INF ? (bits & SIGN) | QUIET_NAN : bits);
  }
};

// Loops of a length known to the compiler have no heads and tails.
template <class Body>
void with_block(uint32_t block, uint64_t count, Body body) {
  uint64_t start = 0;
  if (block == 32)
    for (; start + 32 <= count; start += 32) body(start, std::integral_constant<uint64_t, 32>{});
  for (; start < count; start += block) body(start, std::min<uint64_t>(block, count - start));
}

template <class Length>
uint32_t largest_magnitude(const float* values, Length length) {
  int32_t largest = 0;
  for (uint64_t i = 0; i < length; ++i) {
    const auto magnitude = static_cast<int32_t>(bits_of(values[i]) & MAGNITUDE);
    largest = largest > magnitude ? largest : magnitude;
  }
  return static_cast<uint32_t>(largest);
}

// Infinities and NaN do not count.
uint32_t largest_finite(const float* values, uint64_t length) {
  int32_t largest = 0;
  for (uint64_t i = 0; i < length; ++i) {
    const auto magnitude = static_cast<int32_t>(bits_of(values[i]) & MAGNITUDE);
    const int32_t counted = magnitude < static_cast<int32_t>(INF) ? magnitude : 0;
    largest = largest > counted ? largest : counted;
  }
  return static_cast<uint32_t>(largest);
}

// A number below 2^-126 counts as zero where there is a scale.
float without_denormal(float value) {
  const uint32_t bits = bits_of(value);
  return float_of(static_cast<int32_t>(bits & MAGNITUDE) >= static_cast<int32_t>(LEAST_NORMAL) ? bits : 0);
}

// Whether all numbers are finite, none is rounded to 2^128, and a denormal one is rounded to 0 beside the largest.
bool is_easy(uint32_t largest) { return largest < power_of_two(127) && (largest >= power_of_two(-70) || largest == 0); }

// E8M0 of OCP MX: the least power of two with which no number of the block is beyond F's largest.
template <class F>
uint32_t shared_exponent(uint32_t largest) {
  const uint32_t beyond = 0x7FFFFFu - (F::LARGEST & 0x7FFFFFu);
  const int exponent = static_cast<int>((largest + beyond) >> 23) - F::LARGEST_EXPONENT;
  return static_cast<uint32_t>(std::max(exponent, F::LEAST_SCALE));
}

float scale_of(uint32_t shared) {
  if (shared == 0xFF) return float_of(QUIET_NAN);
  return float_of(shared == 0 ? 0x400000u : shared << 23);
}

// One code an element, no scale.
template <class F, bool stochastic>
void encode_plain(const float* __restrict values, const uint16_t* __restrict random, uint64_t count,
                  std::byte* __restrict codes) {
  for (uint64_t i = 0; i < count; ++i) {
    const auto code = static_cast<uint16_t>(
        F::template code<stochastic, false>(bits_of(values[i]), values[i], stochastic ? random[i] : 0));
    std::memcpy(codes + 2 * i, &code, sizeof code);
  }
}
template <class F>
void decode_plain(const std::byte*, const std::byte* __restrict codes, uint64_t count, uint32_t,
                  float* __restrict values) {
  for (uint64_t i = 0; i < count; ++i) {
    uint16_t code;
    std::memcpy(&code, codes + 2 * i, sizeof code);
    values[i] = F::value(code, 1.0f);
  }
}

// A byte an element, a power of two a block.
template <class F, bool stochastic, bool easy, class Length>
void encode_scaled_numbers(const float* __restrict values, const uint16_t* __restrict random, Length length,
                           float inverse, uint32_t limit, uint8_t* __restrict codes) {
  for (uint64_t i = 0; i < length; ++i) {
    const float value = (easy ? values[i] : without_denormal(values[i])) * inverse;
    codes[i] = static_cast<uint8_t>(
        F::template code<stochastic, easy>(bits_of(values[i]), value, stochastic ? random[i] : 0, limit));
  }
}
template <class F, class Length>
void decode_scaled_block(const uint8_t* __restrict codes, Length length, float scale, float* __restrict values) {
  for (uint64_t i = 0; i < length; ++i) values[i] = F::value(codes[i], scale);
}
template <class F>
void decode_scaled(const std::byte* scales, const std::byte* codes, uint64_t count, uint32_t block, float* values) {
  with_block(block, count, [&](uint64_t start, auto length) {
    decode_scaled_block<F>(reinterpret_cast<const uint8_t*>(codes) + start, length,
                           scale_of(static_cast<uint32_t>(*scales++)), values + start);
  });
}

// MX4. In a block whose shared exponent is 0xFF a code says of what kind the number is: infinite, NaN or finite.
constexpr uint32_t ODD_BLOCK = 0xFF;
constexpr uint32_t ODD_INFINITY = 7, ODD_NAN = 6;

// Two codes are a number of 16 bits first, and then a byte. So each loop turns vectors of one kind into vectors of
// another.
template <class Length>
void pack(const uint8_t* __restrict codes, Length count, uint8_t* __restrict packed) {
  for (uint64_t i = 0; i < count / 2; ++i) {
    uint16_t two;
    std::memcpy(&two, codes + 2 * i, sizeof two);
    packed[i] = static_cast<uint8_t>(two | two >> 4);
  }
  if (count % 2 != 0) packed[count / 2] = codes[count - 1];
}
template <class Length>
void unpack(const uint8_t* __restrict packed, Length count, uint8_t* __restrict codes) {
  for (uint64_t i = 0; i < (count + 1) / 2; ++i) {
    const auto two = static_cast<uint16_t>((packed[i] | packed[i] << 4) & 0x0F0F);
    std::memcpy(codes + 2 * i, &two, sizeof two);
  }
}

// A number that may not be easy, in a block with the scale `shared`.
template <class F, bool stochastic>
void encode_scaled_block(const float* values, const uint16_t* random, uint64_t length, uint32_t shared,
                         uint8_t* codes) {
  // The last of F's numbers below 2^128 / scale.
  const uint32_t beyond = std::min(381u - shared, 254u) << 23, limit = smaller(beyond | F::WHOLE_STEPS, F::LARGEST);
  encode_scaled_numbers<F, stochastic, false>(values, random, length, float_of((254u - shared) << 23), limit, codes);
}
void encode_odd_block(const float* values, uint64_t length, uint8_t* codes) {
  for (uint64_t i = 0; i < length; ++i) {
    const uint32_t bits = bits_of(values[i]), magnitude = bits & MAGNITUDE;
    const uint32_t kind = magnitude > INF ? ODD_NAN : magnitude == INF ? ODD_INFINITY : 0;
    codes[i] = static_cast<uint8_t>(kind | ((bits >> 28) & 8u));
  }
}

// In groups of blocks: first all their scales, so that the search in one block does not wait for the codes of another.
constexpr uint64_t GROUP = 8;
template <class Body>
void for_each_block(uint64_t block, uint64_t length, Body body) {
  if (block == 32 && length == 32 * GROUP) {
    for (uint64_t n = 0; n < GROUP; ++n) body(n, 32 * n, std::integral_constant<uint64_t, 32>{});
    return;
  }
  for (uint64_t n = 0, at = 0; at < length; ++n, at += block) body(n, at, std::min(block, length - at));
}

template <class F, bool stochastic>
void encode_scaled(const float* values, const uint16_t* random, uint64_t count, uint64_t block, std::byte* scales,
                   std::byte* to) {
  constexpr bool is_mx4 = F::SIGN_BIT == 3;
  // Nobody reads the random numbers unless rounding is stochastic.
  if constexpr (!stochastic) random = reinterpret_cast<const uint16_t*>(values);
  if constexpr (is_mx4) block = 32;
  for (uint64_t start = 0; start < count; start += GROUP * block) {
    const uint64_t length = std::min(GROUP * block, count - start);
    const float* const from = values + start;
    const uint16_t* const drawn = random + start;
    uint8_t halves[is_mx4 ? 32 * GROUP : 1];
    uint8_t* const codes = is_mx4 ? halves : reinterpret_cast<uint8_t*>(to) + start;
    uint32_t largest[GROUP] = {}, shared[GROUP] = {};
    float inverse[GROUP] = {};
    bool are_easy = true;
    for_each_block(block, length, [&](uint64_t n, uint64_t at, auto size) {
      largest[n] = largest_magnitude(from + at, size);
      are_easy &= is_easy(largest[n]);
    });
    for_each_block(block, length, [&](uint64_t n, uint64_t at, uint64_t size) {
      if (is_mx4 && largest[n] >= INF)
        shared[n] = ODD_BLOCK;
      else
        shared[n] = shared_exponent<F>(largest[n] < INF ? largest[n] : largest_finite(from + at, size));
      inverse[n] = float_of((254u - shared[n]) << 23);
      *scales++ = static_cast<std::byte>(shared[n]);
    });
    if (are_easy) {
      for_each_block(block, length, [&](uint64_t n, uint64_t at, auto size) {
        encode_scaled_numbers<F, stochastic, true>(from + at, drawn + at, size, inverse[n], 0, codes + at);
      });
    } else {
      for_each_block(block, length, [&](uint64_t n, uint64_t at, uint64_t size) {
        if (shared[n] == ODD_BLOCK) return encode_odd_block(from + at, size, codes + at);
        encode_scaled_block<F, stochastic>(from + at, drawn + at, size, shared[n], codes + at);
      });
    }
    if constexpr (is_mx4) pack(codes, length, reinterpret_cast<uint8_t*>(to) + start / 2);
  }
}

void decode_mx4(const std::byte* scales, const std::byte* from, uint64_t count, uint32_t, float* values) {
  with_block(32, count, [&](uint64_t start, auto length) {
    const auto* const packed = reinterpret_cast<const uint8_t*>(from) + start / 2;
    uint8_t codes[32];
    unpack(packed, length, codes);
    const auto shared = static_cast<uint32_t>(*scales++);
    if (shared != ODD_BLOCK) return decode_scaled_block<E2M1>(codes, length, scale_of(shared), values + start);
    for (uint64_t i = 0; i < length; ++i) {
      const uint32_t kind = codes[i] & 7u, sign = (codes[i] & 8u) << 28;
      values[start + i] = float_of(sign | (kind == ODD_INFINITY ? INF : kind == ODD_NAN ? QUIET_NAN : 0));
    }
  });
}

// Codes of int8 beyond -126 to 126.
constexpr uint32_t INT8_INFINITY = 127, INT8_MINUS_INFINITY = 0x81, INT8_NAN = 0x80;
constexpr uint32_t INT8_LARGEST = 0x42FC0000;  // 126

template <bool stochastic, bool easy, class Length>
void encode_int8_block(const float* __restrict values, const uint16_t* __restrict random, Length length, float inverse,
                       uint8_t* __restrict codes) {
  for (uint64_t i = 0; i < length; ++i) {
    const uint32_t bits = bits_of(values[i]);
    float y = (easy ? values[i] : without_denormal(values[i])) * inverse;
    // The product of the largest number may be a little more than 126. Only an offset can then make it 127.
    if constexpr (stochastic || !easy) y = float_of(smaller(bits_of(y) & MAGNITUDE, INT8_LARGEST) | (bits & SIGN));
    if constexpr (stochastic) y = y + dither<16>(random[i], power_of_two(0));
    // The addition rounds to a whole number, whose two's complement is in the last bits.
    uint32_t code = bits_of(y + 12'582'912.0f);
    if constexpr (!easy) {
      const auto magnitude = static_cast<int32_t>(bits & MAGNITUDE);
      const uint32_t infinity = INT8_INFINITY + (bits >> 31) * (INT8_MINUS_INFINITY - INT8_INFINITY);
      code = magnitude >= static_cast<int32_t>(INF) ? infinity : code;
      code = magnitude > static_cast<int32_t>(INF) ? INT8_NAN : code;
    }
    codes[i] = static_cast<uint8_t>(code);
  }
}
template <bool stochastic>
void encode_int8(const float* values, const uint16_t* random, uint64_t count, uint32_t block, std::byte* scales,
                 std::byte* codes) {
  with_block(block, count, [&](uint64_t start, auto length) {
    const uint32_t largest = largest_magnitude(values + start, length);
    const uint32_t finite = largest >= INF ? largest_finite(values + start, length) : largest;
    const float scale = std::max(float_of(greater(finite, LEAST_NORMAL)) / 126.0f, float_of(LEAST_NORMAL));
    std::memcpy(scales, &scale, sizeof scale);
    scales += sizeof scale;
    const uint16_t* const drawn = stochastic ? random + start : nullptr;
    auto* const to = reinterpret_cast<uint8_t*>(codes) + start;
    if (is_easy(largest)) return encode_int8_block<stochastic, true>(values + start, drawn, length, 1.0f / scale, to);
    encode_int8_block<stochastic, false>(values + start, drawn, uint64_t{length}, 1.0f / scale, to);
  });
}

template <class Length>
void decode_int8_block(const int8_t* __restrict codes, Length length, float scale, float* __restrict values) {
  for (uint64_t i = 0; i < length; ++i) {
    const int32_t code = codes[i];
    uint32_t found = bits_of(static_cast<float>(code) * scale);
    found = code == 127 ? INF : found;
    found = code == -127 ? INF | SIGN : found;
    found = code == -128 ? QUIET_NAN : found;
    values[i] = float_of(found);
  }
}
void decode_int8(const std::byte* scales, const std::byte* codes, uint64_t count, uint32_t block, float* values) {
  with_block(block, count, [&](uint64_t start, auto length) {
    float scale;
    std::memcpy(&scale, scales, sizeof scale);
    scales += sizeof scale;
    decode_int8_block(reinterpret_cast<const int8_t*>(codes) + start, length, scale, values + start);
  });
}

template <class F>
void encode_without_scales(const float* values, const uint16_t* random, uint64_t count, uint32_t, std::byte*,
                           std::byte* codes) {
  if (random != nullptr) return encode_plain<F, true>(values, random, count, codes);
  encode_plain<F, false>(values, random, count, codes);
}
template <class F>
void encode_with_scales(const float* values, const uint16_t* random, uint64_t count, uint32_t block, std::byte* scales,
                        std::byte* codes) {
  if (random != nullptr) return encode_scaled<F, true>(values, random, count, block, scales, codes);
  encode_scaled<F, false>(values, random, count, block, scales, codes);
}
void encode_integers(const float* values, const uint16_t* random, uint64_t count, uint32_t block, std::byte* scales,
                     std::byte* codes) {
  if (random != nullptr) return encode_int8<true>(values, random, count, block, scales, codes);
  encode_int8<false>(values, random, count, block, scales, codes);
}
// `sum` may be `values`.
void add_residual(const float* values, const float* residual, float* sum, uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) sum[i] = values[i] + residual[i];
}

// An infinite or NaN residual would spoil every later number.
void keep_residual(const float* __restrict values, const float* __restrict decoded, float* __restrict residual,
                   uint64_t count) {
  for (uint64_t i = 0; i < count; ++i) {
    const float lost = values[i] - decoded[i];
    residual[i] = static_cast<int32_t>(bits_of(values[i]) & MAGNITUDE) < static_cast<int32_t>(INF) ? lost : 0.0f;
  }
}

}  // namespace

CodecKernels codec_kernels(CodecKind kind) {
  CodecKernels found{nullptr, nullptr, &add_residual, &keep_residual, &fill_random};
  switch (kind) {
    case CodecKind::fp16:
      found.encode = &encode_without_scales<Fp16>;
      found.decode = &decode_plain<Fp16>;
      break;
    case CodecKind::bf16:
      found.encode = &encode_without_scales<BFloat16>;
      found.decode = &decode_plain<BFloat16>;
      break;
    case CodecKind::fp8_e4m3:
      found.encode = &encode_with_scales<E4M3>;
      found.decode = &decode_scaled<E4M3>;
      break;
    case CodecKind::fp8_e5m2:
      found.encode = &encode_with_scales<E5M2>;
      found.decode = &decode_scaled<E5M2>;
      break;
    case CodecKind::int8:
      found.encode = &encode_integers;
      found.decode = &decode_int8;
      break;
    case CodecKind::mx4:
      found.encode = &encode_with_scales<E2M1>;
      found.decode = &decode_mx4;
      break;
    case CodecKind::lossless:  // has no kernels of an instruction set
      break;
  }
  return found;
}

}  // namespace sennit::SENNIT_CODEC_VARIANT
