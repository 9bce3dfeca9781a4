// SPDX-License-Identifier: Apache-2.0
// libFuzzer target: any bytes are decoded within their memory or refused, and what comes out is coded and decoded
// again.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "codec/codec.hpp"
#include "codec/kernels.hpp"

// One variant of the kernels is built here, with the sanitizers. They are the same loops in all.
#if defined(__x86_64__)
namespace sennit {
CodecKernels avx2::codec_kernels(CodecKind kind) { return baseline::codec_kernels(kind); }
CodecKernels avx512::codec_kernels(CodecKind kind) { return baseline::codec_kernels(kind); }
}  // namespace sennit
#endif

using namespace sennit;

namespace {

constexpr sennit_dtype DTYPES[] = {SENNIT_F32, SENNIT_F16, SENNIT_BF16, SENNIT_I32, SENNIT_I64};
constexpr uint64_t ITEM_BYTES[] = {4, 2, 2, 4, 8};

void require(bool holds) {
  if (!holds) std::abort();
}

// Returns whether the bytes were decoded.
bool try_decode(const CodecSpec& spec, size_t type, std::span<const std::byte> coded, uint64_t count) {
  const uint64_t size_bytes = count * ITEM_BYTES[type];
  const std::unique_ptr<std::byte[]> decoded(new std::byte[size_bytes]), twice(new std::byte[size_bytes]);
  if (!decode(spec, DTYPES[type], coded, count, DTYPES[type], decoded.get())) return false;
  const uint64_t most = coded_bytes(spec, DTYPES[type], count);
  const std::unique_ptr<std::byte[]> again(new std::byte[most]);
  const uint64_t size = encode(spec, DTYPES[type], decoded.get(), count, 7, {again.get(), most});
  require(size <= most && decode(spec, DTYPES[type], {again.get(), size}, count, DTYPES[type], twice.get()));
  if (spec.kind == CodecKind::lossless) require(std::memcmp(decoded.get(), twice.get(), size_bytes) == 0);
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t HEAD_BYTES = 5;
  if (size < HEAD_BYTES) return 0;
  const auto kind = static_cast<CodecKind>(data[0] % CODEC_KINDS);
  const std::span<const std::byte> coded(reinterpret_cast<const std::byte*>(data) + HEAD_BYTES, size - HEAD_BYTES);
  if (kind == CodecKind::lossless) {
    try_decode({kind, 0, false, 0}, data[1] % std::size(DTYPES), coded, data[3] + 256u * (data[4] % 64));
    return 0;
  }
  const bool has_block = kind == CodecKind::fp8_e4m3 || kind == CodecKind::fp8_e5m2 || kind == CodecKind::int8;
  const uint32_t block = has_block ? 1u + data[1] : kind == CodecKind::mx4 ? 32 : 0;
  const CodecSpec spec{kind, block, (data[2] & 1) != 0, data[2]};
  const size_t type = data[2] % 3;
  // The count that fits the bytes, if one does, and one beside it.
  uint64_t count = 0;
  while (coded_bytes(spec, DTYPES[type], count + 1) <= coded.size()) ++count;
  require(try_decode(spec, type, coded, count) == (coded_bytes(spec, DTYPES[type], count) == coded.size()));
  require(!try_decode(spec, type, coded, count + 2));
  return 0;
}
