// SPDX-License-Identifier: Apache-2.0
// Codecs in every variant of the kernels: all must give the same bits, in every mode of the processor. Formats are
// compared with their definition in tests/transport/test_codecs.py.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "codec/codec.hpp"
#include "codec/kernels.hpp"
#include "digest.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace sennit;

namespace {

using Find = CodecKernels (*)(CodecKind);
using Bytes = std::vector<std::byte>;

std::vector<Find> variants() {
  std::vector<Find> found{baseline::codec_kernels};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) found.push_back(avx2::codec_kernels);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    found.push_back(avx512::codec_kernels);
  }
#endif
  return found;
}

constexpr CodecKind KINDS[] = {CodecKind::fp16,     CodecKind::bf16, CodecKind::fp8_e4m3,
                               CodecKind::fp8_e5m2, CodecKind::int8, CodecKind::mx4};

uint32_t any_block(std::mt19937_64& random, CodecKind kind) {
  constexpr uint32_t BLOCKS[] = {1, 3, 16, 32, 64, 100, 1'024, 4'096};
  if (kind == CodecKind::mx4) return 32;
  return kind == CodecKind::fp16 || kind == CodecKind::bf16 ? 0 : BLOCKS[random() % 8];
}

// Of about one size, with others among them: any bits, denormal numbers, infinities, NaN.
std::vector<float> any_numbers(std::mt19937_64& random, uint64_t count) {
  std::vector<float> made(count);
  const float size = std::ldexp(1.0f, static_cast<int>(random() % 250) - 125);
  const uint64_t odd = random() % 3 == 0 ? 8 : 1 << 20;
  for (float& number : made) {
    number = size * (static_cast<float>(random() % 2'001) - 1'000.0f) / 777.0f;
    if (random() % odd == 0) number = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (random() % odd == 0) number = std::bit_cast<float>(static_cast<uint32_t>(random() & 0x807FFFFF));
    if (random() % odd == 0) number = std::numeric_limits<float>::infinity();
  }
  return made;
}

// The memory of exactly so many bytes, so that the sanitizer sees every access beside it.
struct Exact {
  explicit Exact(size_t count) : bytes(new std::byte[count]), size(count) {}
  std::span<std::byte> span() const { return {bytes.get(), size}; }
  std::unique_ptr<std::byte[]> bytes;
  size_t size;
};

}  // namespace

TEST_CASE("variants and processors code and decode to the same bits, also where denormal numbers are flushed") {
  std::mt19937_64 random(11);
  tests::Digest digest;
  for (int round = 0; round < 300; ++round) {
    const CodecKind kind = KINDS[random() % std::size(KINDS)];
    const uint32_t block = std::max(any_block(random, kind), 1u);
    const uint64_t count = random() % 5'000;
    const std::vector<float> values = any_numbers(random, count);
    const uint64_t seed = random(), first = random() >> (random() % 60);
    const uint64_t counters = (count + 7) / 8 / RANDOM_GROUP * RANDOM_GROUP + RANDOM_GROUP;
    Bytes scales_first, codes_first;
    std::vector<float> decoded_first;
    for (const Find find : variants()) {
      const CodecKernels kernel = find(kind);
      std::vector<uint16_t> drawn(8 * counters);
      kernel.fill_random(seed, first, counters, drawn.data());
      for (const bool is_flushed : {false, true}) {
#if defined(__x86_64__)
        const uint32_t mode = _mm_getcsr();
        if (is_flushed) _mm_setcsr(mode | 0x8040);  // FTZ and DAZ
#endif
        Bytes scales(4 * (count + 1)), codes(2 * count + 1);
        std::vector<float> decoded(count);
        kernel.encode(values.data(), round % 2 == 0 ? drawn.data() : nullptr, count, block, scales.data(),
                      codes.data());
        kernel.decode(scales.data(), codes.data(), count, block, decoded.data());
#if defined(__x86_64__)
        _mm_setcsr(mode);
#endif
        if (scales_first.empty()) {
          scales_first = scales;
          codes_first = codes;
          decoded_first = decoded;
        }
        CAPTURE(static_cast<uint32_t>(kind));
        CAPTURE(block);
        CAPTURE(is_flushed);
        CHECK(scales == scales_first);
        CHECK(codes == codes_first);
        CHECK((count == 0 || std::memcmp(decoded.data(), decoded_first.data(), count * sizeof(float)) == 0));
      }
    }
    for (const Bytes& bytes : {scales_first, codes_first}) digest.add(bytes);
    digest.add(std::as_bytes(std::span(decoded_first)));
  }
  CHECK(digest.value() == 0x7328EEF854ABB4D0u);
}

TEST_CASE("a range is coded within its memory, in pieces or whole") {
  std::mt19937_64 random(12);
  for (int round = 0; round < 200; ++round) {
    const CodecKind kind = KINDS[random() % std::size(KINDS)];
    const CodecSpec spec{kind, any_block(random, kind), round % 2 == 0, random()};
    const uint64_t count = random() % 9'000, first = random() >> 20;
    const std::vector<float> values = any_numbers(random, count);
    const Exact coded(coded_bytes(spec, SENNIT_F32, count)), decoded(count * sizeof(float));
    CHECK(encode(spec, SENNIT_F32, values.data(), count, first, coded.span()) == coded.size);
    REQUIRE(decode(spec, SENNIT_F32, coded.span(), count, SENNIT_F32, decoded.bytes.get()));
    const uint64_t unit = std::max(spec.block, 1u), cut = random() % (count / unit + 1) * unit;
    for (const auto& [low, high] : {std::pair{uint64_t{0}, cut}, std::pair{cut, count}}) {
      const Exact part(coded_bytes(spec, SENNIT_F32, high - low)), again((high - low) * sizeof(float));
      encode(spec, SENNIT_F32, values.data() + low, high - low, first + low, part.span());
      REQUIRE(decode(spec, SENNIT_F32, part.span(), high - low, SENNIT_F32, again.bytes.get()));
      CHECK((again.size == 0 || std::memcmp(again.bytes.get(), decoded.bytes.get() + 4 * low, again.size) == 0));
    }
  }
}

TEST_CASE("any bytes are decoded within their memory or refused") {
  std::mt19937_64 random(13);
  for (int round = 0; round < 500; ++round) {
    const CodecKind kind = KINDS[random() % std::size(KINDS)];
    const CodecSpec spec{kind, any_block(random, kind), false, 0};
    const uint64_t count = random() % 3'000;
    const sennit_dtype dtype = round % 3 == 0 ? SENNIT_F32 : round % 3 == 1 ? SENNIT_F16 : SENNIT_BF16;
    const Exact coded(coded_bytes(spec, dtype, count)), decoded(count * (dtype == SENNIT_F32 ? 4 : 2));
    for (std::byte& byte : coded.span()) byte = static_cast<std::byte>(random());
    CHECK(decode(spec, dtype, coded.span(), count, dtype, decoded.bytes.get()));
    if (coded.size != 0) CHECK(!decode(spec, dtype, coded.span().first(coded.size - 1), count, dtype, nullptr));
    CHECK(!decode(spec, dtype, coded.span(), count + 2, dtype, nullptr));
  }
}

TEST_CASE("lossless gives every bit back, and no changed byte leads out of its memory") {
  std::mt19937_64 random(14);
  const CodecSpec spec{CodecKind::lossless, 0, false, 0};
  for (int round = 0; round < 400; ++round) {
    constexpr sennit_dtype DTYPES[] = {SENNIT_F32, SENNIT_F16, SENNIT_BF16, SENNIT_I32, SENNIT_I64};
    constexpr uint64_t ITEM_BYTES[] = {4, 2, 2, 4, 8};
    const size_t type = random() % std::size(DTYPES);
    const uint64_t count = random() % (round % 8 == 0 ? 20'000 : 600), size = count * ITEM_BYTES[type];
    const Exact source(size), decoded(size), most(coded_bytes(spec, DTYPES[type], count));
    const uint64_t spread = 1 + random() % 256;
    for (std::byte& byte : source.span()) byte = static_cast<std::byte>(std::min(random() % spread, random() % 256));
    const uint64_t coded_size = encode(spec, DTYPES[type], source.bytes.get(), count, 0, most.span());
    const Exact coded(coded_size);
    if (coded_size != 0) std::memcpy(coded.bytes.get(), most.bytes.get(), coded_size);
    REQUIRE(decode(spec, DTYPES[type], coded.span(), count, DTYPES[type], decoded.bytes.get()));
    CHECK((size == 0 || std::memcmp(source.bytes.get(), decoded.bytes.get(), size) == 0));
    if (coded_size == 0) continue;
    CHECK(!decode(spec, DTYPES[type], coded.span().first(coded_size - 1), count, DTYPES[type], decoded.bytes.get()));
    for (int change = 0; change < 20; ++change) {
      // Mostly heads: elsewhere any bits are good.
      const size_t at = random() % (change % 2 == 0 ? std::min<size_t>(coded_size, 64) : coded_size);
      coded.span()[at] = static_cast<std::byte>(random());
      const bool is_good = decode(spec, DTYPES[type], coded.span(), count, DTYPES[type], decoded.bytes.get());
      if (is_good) CHECK(coded_size <= most.size);
    }
  }
  const float value = 1.0f;
  float residual = 0.0f;
  const Exact room(64);
  CHECK_THROWS_AS(encode(spec, SENNIT_F32, &value, 1, 0, room.span(), &residual), std::invalid_argument);
  CHECK(codec_refusal(spec, SENNIT_F64) == "element type 8; allowed: F32, F16, BF16, I32, I64");
  CHECK(codec_refusal({CodecKind::lossless, 0, true, 0}, SENNIT_F32).starts_with("stochastic"));
}

TEST_CASE("what has no meaning is refused by name") {
  const CodecSpec good{CodecKind::int8, 64, false, 0};
  const float value = 1.0f;
  CHECK(codec_refusal(good, SENNIT_F32).empty());
  CHECK(codec_refusal(good, SENNIT_I64) == "element type 4; allowed: F32, F16, BF16");
  CHECK(codec_refusal({CodecKind::int8, 5'000, false, 0}, SENNIT_F32) == "block 5000; allowed: 1 to 4096");
  CHECK(codec_refusal({CodecKind::mx4, 64, false, 0}, SENNIT_F32) == "block 64 of mx4; allowed: 32");
  CHECK(codec_refusal({CodecKind::bf16, 1, false, 0}, SENNIT_F32) == "block 1; allowed: 0 to 0");
  CHECK(codec_refusal({static_cast<CodecKind>(77), 0, false, 0}, SENNIT_F32).starts_with("codec number 77"));
  const Exact room(4);
  CHECK_THROWS_AS(encode(good, SENNIT_F32, &value, 1, 0, room.span()), std::invalid_argument);
  CHECK_THROWS_AS(encode(good, SENNIT_BOOL, &value, 1, 0, room.span()), std::invalid_argument);
}
