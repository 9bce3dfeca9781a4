// SPDX-License-Identifier: Apache-2.0
#include "reduce/stream_copy.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sennit {

#if defined(__x86_64__)
namespace {

constexpr size_t LINE = 64;

void stream_lines_sse2(char* destination, const char* source, size_t line_count) {
  for (size_t i = 0; i < line_count; ++i, destination += LINE, source += LINE) {
    for (size_t part = 0; part < LINE; part += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(destination + part),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + part)));
    }
  }
}

__attribute__((target("avx512f"))) void stream_lines_avx512(char* destination, const char* source, size_t line_count) {
  size_t i = 0;
  for (; i + 4 <= line_count; i += 4, destination += 4 * LINE, source += 4 * LINE) {
    const __m512i a = _mm512_loadu_si512(source);
    const __m512i b = _mm512_loadu_si512(source + LINE);
    const __m512i c = _mm512_loadu_si512(source + 2 * LINE);
    const __m512i d = _mm512_loadu_si512(source + 3 * LINE);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + LINE), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + 2 * LINE), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + 3 * LINE), d);
  }
  for (; i < line_count; ++i, destination += LINE, source += LINE) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination), _mm512_loadu_si512(source));
  }
}

}  // namespace

void stream_copy(void* destination, const void* source, size_t size_bytes) {
  char* to = static_cast<char*>(destination);
  const char* from = static_cast<const char*>(source);
  const size_t head = std::min(size_bytes, static_cast<size_t>(-reinterpret_cast<uintptr_t>(to) & (LINE - 1)));
  std::memcpy(to, from, head);
  const size_t line_count = (size_bytes - head) / LINE;
  static const bool has_avx512 = __builtin_cpu_supports("avx512f");
  (has_avx512 ? stream_lines_avx512 : stream_lines_sse2)(to + head, from + head, line_count);
  _mm_sfence();
  const size_t done = head + line_count * LINE;
  std::memcpy(to + done, from + done, size_bytes - done);
}
#else
void stream_copy(void* destination, const void* source, size_t size_bytes) {
  std::memcpy(destination, source, size_bytes);
}
#endif

}  // namespace sennit
