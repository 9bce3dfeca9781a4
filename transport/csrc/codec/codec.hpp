// SPDX-License-Identifier: Apache-2.0
// codec: ranges of elements in fewer bytes, and back. docs/reference/codecs.md defines the formats bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "sennit/core.h"

namespace sennit {

// A plan and Python name codecs by these numbers.
enum class CodecKind : uint32_t { fp16, bf16, fp8_e4m3, fp8_e5m2, int8, mx4, lossless };
inline constexpr uint32_t CODEC_KINDS = 7;

// Longer blocks would not stay in the first-level cache between the search for the scale and its use.
inline constexpr uint32_t MAX_CODEC_BLOCK = 4'096;

struct CodecSpec {
  CodecKind kind;
  uint32_t block;      // elements that share a scale; 0 where there is none
  bool is_stochastic;  // rounding keyed by the seed and the element's logical index, else to nearest even
  uint64_t seed;
};

// Why elements of this type cannot be coded so; empty if they can.
std::string codec_refusal(const CodecSpec& spec, sennit_dtype dtype);

// The bytes of `count` coded elements; of lossless the most they may take.
uint64_t coded_bytes(const CodecSpec& spec, sennit_dtype dtype, uint64_t count);

// Codes `count` elements and returns the bytes written. `first_index` is the logical index of the first one: it keys
// stochastic rounding, so a range cut at borders of blocks is coded to the same numbers.
//
// `residual` (may be null): fp32, a number an element. It is added to the elements before, and holds afterwards what
// coding took from the sum (0 where the sum is no finite number).
//
// Throws std::invalid_argument for what codec_refusal names, for a residual of lossless, or if `destination` is smaller
// than coded_bytes.
uint64_t encode(const CodecSpec& spec, sennit_dtype dtype, const void* source, uint64_t count, uint64_t first_index,
                std::span<std::byte> destination, float* residual = nullptr);

// Elements `start` to `end` of a range of `count` fixed-size coded elements, whose coded form begins at `coded`.
// `start` is a multiple of codec_step. codec_refusal must be empty, and the codec not lossless.
void encode_part(const CodecSpec& spec, sennit_dtype dtype, const void* source, uint64_t count, uint64_t first_index,
                 std::byte* coded, uint64_t start, uint64_t end, float* residual = nullptr);
void decode_part(const CodecSpec& spec, const std::byte* coded, uint64_t count, sennit_dtype result, void* destination,
                 uint64_t start, uint64_t end);
// Parts of a coded range begin at multiples of so many elements: a block, or the few whose codes fill bytes.
uint64_t codec_step(const CodecSpec& spec);

// Lossless coding in pieces that begin at multiples of 8,192 elements. The codes of the pieces follow each other. Both
// functions return the bytes of the codes. The decoder returns nothing if these are not codes of so many elements.
// codec_refusal must be empty.
uint64_t encode_lossless_part(sennit_dtype dtype, const std::byte* source, uint64_t count, std::byte* coded);
[[nodiscard]] std::optional<uint64_t> decode_lossless_part(sennit_dtype dtype, std::span<const std::byte> coded,
                                                           uint64_t count, std::byte* destination);

// Decodes `count` elements as `result`: the type that was coded, or, for floats, fp32. False if `coded` is not what
// encode makes of so many elements. Whatever the bytes are, nothing outside of them is read and nothing outside of the
// elements is written.
[[nodiscard]] bool decode(const CodecSpec& spec, sennit_dtype dtype, std::span<const std::byte> coded, uint64_t count,
                          sennit_dtype result, void* destination);

}  // namespace sennit
