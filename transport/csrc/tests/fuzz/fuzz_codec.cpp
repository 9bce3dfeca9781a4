// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: any bytes are decoded within their memory or refused, and what comes out is coded again.
#include <cstdlib>
#include <memory>

#include "codec/codec.hpp"

// One variant of the kernels is built here, with the sanitizers. They are the same loops in all.
#include "codec/kernels.hpp"
#if defined(__x86_64__)
namespace sennit {
CodecKernels avx2::codec_kernels(CodecKind kind) { return baseline::codec_kernels(kind); }
CodecKernels avx512::codec_kernels(CodecKind kind) { return baseline::codec_kernels(kind); }
}  // namespace sennit
#endif

using namespace sennit;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t HEAD_BYTES = 5;
  if (size < HEAD_BYTES) return 0;
  const auto kind = static_cast<CodecKind>(data[0] % CODEC_KINDS);
  const bool has_block = kind == CodecKind::fp8_e4m3 || kind == CodecKind::fp8_e5m2 || kind == CodecKind::int8;
  const uint32_t block = has_block ? 1 + data[1] : kind == CodecKind::mx4 ? 32 : 0;
  const CodecSpec spec{kind, block, (data[2] & 1) != 0, data[2]};
  const sennit_dtype dtype = data[2] % 3 == 0 ? SENNIT_F32 : data[2] % 3 == 1 ? SENNIT_F16 : SENNIT_BF16;
  const uint64_t item = dtype == SENNIT_F32 ? 4 : 2;
  data += HEAD_BYTES;
  size -= HEAD_BYTES;
  // The count that fits the bytes, if one does, and one beside it.
  uint64_t fitting = 0;
  while (coded_bytes(spec, dtype, fitting + 1) <= size) ++fitting;
  for (const uint64_t count : {fitting, fitting + 1}) {
    const std::unique_ptr<std::byte[]> decoded(new std::byte[count * item]);
    const std::span<const std::byte> coded(reinterpret_cast<const std::byte*>(data), size);
    const bool fits = coded_bytes(spec, dtype, count) == size;
    if (decode(spec, dtype, coded, count, dtype, decoded.get()) != fits) std::abort();
    if (!fits) continue;
    const std::unique_ptr<std::byte[]> again(new std::byte[size]);
    if (encode(spec, dtype, decoded.get(), count, data[-1], {again.get(), size}) != size) std::abort();
    if (!decode(spec, dtype, {again.get(), size}, count, dtype, decoded.get())) std::abort();
  }
  return 0;
}
