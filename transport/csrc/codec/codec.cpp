// SPDX-License-Identifier: Apache-2.0
#include "codec/codec.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "codec/kernels.hpp"
#include "codec/lossless.hpp"

namespace sennit {
namespace {

constexpr uint32_t MX_BLOCK = 32;
// A piece of a range: whole blocks, whose values, random numbers and decoded values stay in the first-level cache.
constexpr uint64_t PIECE = 1'024;

CodecKernels kernels(CodecKind kind) {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx512) return avx512::codec_kernels(kind);
  if (has_avx2) return avx2::codec_kernels(kind);
#endif
  return baseline::codec_kernels(kind);
}

struct Layout {
  uint32_t scale_bytes;  // a block
  uint32_t code_bits;    // an element
};

Layout layout_of(CodecKind kind) {
  switch (kind) {
    case CodecKind::fp16:
    case CodecKind::bf16:
      return {0, 16};
    case CodecKind::fp8_e4m3:
    case CodecKind::fp8_e5m2:
      return {1, 8};
    case CodecKind::int8:
      return {4, 8};
    case CodecKind::mx4:
      return {1, 4};
    case CodecKind::lossless:
      break;
  }
  return {0, 0};
}

// Where the scales and codes of elements from `start` lie. `start` is the first of a block.
struct Sections {
  Sections(const CodecSpec& spec, uint64_t count) : layout(layout_of(spec.kind)), block(std::max(spec.block, 1u)) {
    scales_bytes = (count + block - 1) / block * layout.scale_bytes;
    all_bytes = scales_bytes + (count * layout.code_bits + 7) / 8;
  }
  uint64_t scales_at(uint64_t start) const { return start / block * layout.scale_bytes; }
  uint64_t codes_at(uint64_t start) const { return scales_bytes + start * layout.code_bits / 8; }
  uint64_t piece() const { return std::max<uint64_t>(PIECE / block, 1) * block; }

  Layout layout;
  uint32_t block;
  uint64_t scales_bytes, all_bytes;
};

bool is_float(sennit_dtype dtype) { return dtype == SENNIT_F32 || dtype == SENNIT_F16 || dtype == SENNIT_BF16; }
// Only for types that a codec takes.
uint64_t item_bytes(sennit_dtype dtype) {
  if (dtype == SENNIT_I64) return 8;
  return dtype == SENNIT_F32 || dtype == SENNIT_I32 ? 4 : 2;
}
// The codec that keeps elements of two bytes as they are.
CodecKind own_codec(sennit_dtype dtype) { return dtype == SENNIT_F16 ? CodecKind::fp16 : CodecKind::bf16; }

}  // namespace

std::string codec_refusal(const CodecSpec& spec, sennit_dtype dtype) {
  const auto number = static_cast<uint32_t>(spec.kind);
  if (number >= CODEC_KINDS) return "codec number " + std::to_string(number) + "; allowed: 0 to 6";
  const bool has_scale = layout_of(spec.kind).scale_bytes != 0;
  const uint32_t least = has_scale ? 1 : 0, most = has_scale ? MAX_CODEC_BLOCK : 0;
  if (spec.kind == CodecKind::mx4 && spec.block != MX_BLOCK)
    return "block " + std::to_string(spec.block) + " of mx4; allowed: 32";
  if (spec.block < least || spec.block > most)
    return "block " + std::to_string(spec.block) + "; allowed: " + std::to_string(least) + " to " +
           std::to_string(most);
  const bool is_lossless = spec.kind == CodecKind::lossless;
  if (is_lossless && spec.is_stochastic) return "stochastic rounding of lossless; allowed: none";
  if (!is_float(dtype) && !(is_lossless && (dtype == SENNIT_I32 || dtype == SENNIT_I64)))
    return "element type " + std::to_string(static_cast<uint32_t>(dtype)) + "; allowed: F32, F16, BF16" +
           (is_lossless ? ", I32, I64" : "");
  return "";
}

uint64_t coded_bytes(const CodecSpec& spec, sennit_dtype dtype, uint64_t count) {
  if (spec.kind == CodecKind::lossless) return lossless_bytes(item_bytes(dtype), count);
  return Sections(spec, count).all_bytes;
}

uint64_t encode(const CodecSpec& spec, sennit_dtype dtype, const void* source, uint64_t count, uint64_t first_index,
                std::span<std::byte> destination, float* residual) {
  if (const std::string refusal = codec_refusal(spec, dtype); !refusal.empty()) throw std::invalid_argument(refusal);
  const uint64_t most = coded_bytes(spec, dtype, count);
  if (destination.size() < most)
    throw std::invalid_argument("room for " + std::to_string(destination.size()) +
                                " bytes; needed: " + std::to_string(most));
  if (spec.kind == CodecKind::lossless) {
    if (residual != nullptr) throw std::invalid_argument("a residual of lossless, which loses nothing");
    return encode_lossless_part(dtype, static_cast<const std::byte*>(source), count, destination.data());
  }
  encode_part(spec, dtype, source, count, first_index, destination.data(), 0, count, residual);
  return most;
}

uint64_t encode_lossless_part(sennit_dtype dtype, const std::byte* source, uint64_t count, std::byte* coded) {
  return lossless_encode(is_float(dtype), item_bytes(dtype), source, count, coded);
}

std::optional<uint64_t> decode_lossless_part(sennit_dtype dtype, std::span<const std::byte> coded, uint64_t count,
                                             std::byte* destination) {
  return lossless_decode(is_float(dtype), item_bytes(dtype), coded, count, destination);
}

uint64_t codec_step(const CodecSpec& spec) { return std::max(spec.block, 2u); }

void encode_part(const CodecSpec& spec, sennit_dtype dtype, const void* source, uint64_t count, uint64_t first_index,
                 std::byte* coded, uint64_t first, uint64_t end, float* residual) {
  const Sections at(spec, count);
  const CodecKernels kernel = kernels(spec.kind);
  alignas(64) float copied[MAX_CODEC_BLOCK];
  alignas(64) float decoded[MAX_CODEC_BLOCK];
  alignas(64) uint16_t random[MAX_CODEC_BLOCK + 16 * RANDOM_GROUP];
  const uint64_t piece = at.piece();
  for (uint64_t start = first; start < end; start += piece) {
    const uint64_t length = std::min(piece, end - start);
    const auto* const from = static_cast<const std::byte*>(source) + start * item_bytes(dtype);
    std::byte* const scales = coded + at.scales_at(start);
    std::byte* const codes = coded + at.codes_at(start);
    const float* values = reinterpret_cast<const float*>(from);
    if (dtype != SENNIT_F32) {
      kernels(own_codec(dtype)).decode(nullptr, from, length, 0, copied);
      values = copied;
    }
    if (residual != nullptr) {
      kernel.add_residual(values, residual + start, copied, length);
      values = copied;
    }
    const uint16_t* drawn = nullptr;
    if (spec.is_stochastic) {
      // Groups begin at multiples of 8 elements.
      const uint64_t index = first_index + start, counters = (index % 8 + length + 7) / 8;
      kernel.fill_random(spec.seed, index / 8, (counters + RANDOM_GROUP - 1) / RANDOM_GROUP * RANDOM_GROUP, random);
      drawn = random + index % 8;
    }
    kernel.encode(values, drawn, length, at.block, scales, codes);
    if (residual != nullptr) {
      kernel.decode(scales, codes, length, at.block, decoded);
      kernel.keep_residual(values, decoded, residual + start, length);
    }
  }
}

namespace {

bool decode_lossless(sennit_dtype dtype, std::span<const std::byte> coded, uint64_t count, sennit_dtype result,
                     std::byte* destination) {
  if (result == dtype) return decode_lossless_part(dtype, coded, count, destination) == coded.size();
  // The narrow elements go to the upper half, and are widened from the first one on.
  std::byte* const narrow = destination + count * item_bytes(dtype);
  if (decode_lossless_part(dtype, coded, count, narrow) != coded.size()) return false;
  const CodecKernels kernel = kernels(own_codec(dtype));
  std::byte piece[2 * PIECE];
  for (uint64_t start = 0; start < count; start += PIECE) {
    const uint64_t length = std::min(PIECE, count - start);
    std::memcpy(piece, narrow + 2 * start, 2 * length);
    kernel.decode(nullptr, piece, length, 0, reinterpret_cast<float*>(destination) + start);
  }
  return true;
}

}  // namespace

bool decode(const CodecSpec& spec, sennit_dtype dtype, std::span<const std::byte> coded, uint64_t count,
            sennit_dtype result, void* destination) {
  if (!codec_refusal(spec, dtype).empty()) return false;
  if (result != dtype && (result != SENNIT_F32 || !is_float(dtype))) return false;
  if (spec.kind == CodecKind::lossless)
    return decode_lossless(dtype, coded, count, result, static_cast<std::byte*>(destination));
  if (coded.size() != Sections(spec, count).all_bytes) return false;
  decode_part(spec, coded.data(), count, result, destination, 0, count);
  return true;
}

void decode_part(const CodecSpec& spec, const std::byte* coded, uint64_t count, sennit_dtype result, void* destination,
                 uint64_t first, uint64_t end) {
  const Sections at(spec, count);
  const CodecKernels kernel = kernels(spec.kind);
  alignas(64) float decoded[MAX_CODEC_BLOCK];
  const uint64_t piece = at.piece();
  for (uint64_t start = first; start < end; start += piece) {
    const uint64_t length = std::min(piece, end - start);
    auto* const to = static_cast<std::byte*>(destination) + start * item_bytes(result);
    float* const values = result == SENNIT_F32 ? reinterpret_cast<float*>(to) : decoded;
    kernel.decode(coded + at.scales_at(start), coded + at.codes_at(start), length, at.block, values);
    if (result != SENNIT_F32) kernels(own_codec(result)).encode(values, nullptr, length, 0, nullptr, to);
  }
}

}  // namespace sennit
