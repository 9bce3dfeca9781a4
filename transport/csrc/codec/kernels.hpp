// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction set: codec.cpp cuts ranges into pieces that fit the first-level cache for them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec.hpp"

namespace sennit {

struct CodecKernels {
  // Turns values into a scale for each block and a code for each element. `random` (a number an element) is null when
  // rounding to nearest.
  void (*encode)(const float* values, const uint16_t* random, uint64_t count, uint32_t block, std::byte* scales,
                 std::byte* codes);
  void (*decode)(const std::byte* scales, const std::byte* codes, uint64_t count, uint32_t block, float* values);
  // `sum` may be `values`. Then residual = values - decoded where the value is finite.
  void (*add_residual)(const float* values, const float* residual, float* sum, uint64_t count);
  void (*keep_residual)(const float* values, const float* decoded, float* residual, uint64_t count);
  // The random numbers of elements 8 * counter to 8 * (counter + counters). `counters` is a multiple of RANDOM_GROUP.
  void (*fill_random)(uint64_t seed, uint64_t counter, uint64_t counters, uint16_t* random);
};

inline constexpr uint64_t RANDOM_GROUP = 16;

namespace baseline {
CodecKernels codec_kernels(CodecKind kind);
}
#if defined(__x86_64__)
namespace avx2 {
CodecKernels codec_kernels(CodecKind kind);
}
namespace avx512 {
CodecKernels codec_kernels(CodecKind kind);
}
#endif

}  // namespace sennit
