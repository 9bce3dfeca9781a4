// SPDX-License-Identifier: Apache-2.0
#include "reduce/large_copy.hpp"

#include <time.h>

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

void CopyTrial::note(Way way, uint64_t ns_a_mib) {
  if (way == Way::plain) {
    plain_ns_.store(ns_a_mib, std::memory_order_relaxed);
    turns_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (ns_a_mib < plain_ns_.load(std::memory_order_relaxed)) streaming_wins_.fetch_add(1, std::memory_order_relaxed);
  const uint32_t pairs = (turns_.fetch_add(1, std::memory_order_relaxed) + 1) / 2;
  if (pairs < PAIRS) return;
  const bool streams = streaming_wins_.load(std::memory_order_relaxed) > PAIRS / 2;
  way_.store(streams ? Way::streaming : Way::plain, std::memory_order_relaxed);
}

namespace {

// Smaller pieces say more about the clock than about the copy.
constexpr size_t TRIAL_MIN_BYTES = 65'536;

uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

void copy(CopyTrial::Way way, void* destination, const void* source, size_t size_bytes) {
  if (way == CopyTrial::Way::plain) {
    std::memcpy(destination, source, size_bytes);
  } else {
    stream_copy(destination, source, size_bytes);
  }
}

}  // namespace

void large_copy(CopySource kind, void* destination, const void* source, size_t size_bytes) {
  static CopyTrial trials[2];
  CopyTrial& trial = trials[static_cast<uint32_t>(kind)];
  CopyTrial::Way way = trial.way();
  if (way != CopyTrial::Way::undecided || size_bytes < TRIAL_MIN_BYTES)
    return copy(way, destination, source, size_bytes);
  way = trial.next();
  const uint64_t began_ns = now_ns();
  copy(way, destination, source, size_bytes);
  trial.note(way, ((now_ns() - began_ns) << 20) / size_bytes);
}

}  // namespace sennit
