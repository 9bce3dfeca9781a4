// SPDX-License-Identifier: Apache-2.0
#include "codec/lossless.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "codec/huffman.hpp"

namespace sennit {
namespace {

// Elements of a block. A code's head is small beside so many, and all planes stay in the second-level cache.
constexpr uint64_t BLOCK = 8'192;

// What follows the byte that names it.
enum class Form : uint8_t { raw, one_byte, huffman };

// A float's bits are rotated, so that the exponent fills the uppermost byte (of binary16 with mantissa bits).
template <class Word>
void split(bool is_float, const std::byte* __restrict source, uint64_t count, uint8_t* __restrict planes) {
  const int turn = is_float ? 1 : 0;
  for (size_t plane = 0; plane < sizeof(Word); ++plane) {
    uint8_t* __restrict const to = planes + plane * BLOCK;
    for (uint64_t i = 0; i < count; ++i) {
      Word word;
      std::memcpy(&word, source + i * sizeof word, sizeof word);
      to[i] = static_cast<uint8_t>(std::rotl(word, turn) >> (8 * plane));
    }
  }
}

template <class Word>
void merge(bool is_float, const uint8_t* __restrict planes, uint64_t count, std::byte* __restrict destination) {
  const int turn = is_float ? 1 : 0;
  for (uint64_t i = 0; i < count; ++i) {
    Word word = 0;
    for (size_t plane = 0; plane < sizeof(Word); ++plane)
      word = static_cast<Word>(word | static_cast<Word>(planes[plane * BLOCK + i]) << (8 * plane));
    word = std::rotr(word, turn);
    std::memcpy(destination + i * sizeof word, &word, sizeof word);
  }
}

template <class Body>
void with_word(uint64_t item_bytes, Body body) {
  if (item_bytes == 2) return body(uint16_t{});
  if (item_bytes == 4) return body(uint32_t{});
  body(uint64_t{});
}

uint64_t encode_plane(std::span<const uint8_t> plane, std::byte* to) {
  if (std::all_of(plane.begin(), plane.end(), [&](uint8_t byte) { return byte == plane[0]; })) {
    to[0] = static_cast<std::byte>(Form::one_byte);
    to[1] = static_cast<std::byte>(plane[0]);
    return 2;
  }
  if (const uint64_t size_bytes = huffman_encode(plane, to + 1); size_bytes != 0) {
    to[0] = static_cast<std::byte>(Form::huffman);
    return 1 + size_bytes;
  }
  to[0] = static_cast<std::byte>(Form::raw);
  std::memcpy(to + 1, plane.data(), plane.size());
  return 1 + plane.size();
}

// Returns how much of `coded` the plane takes; 0 if it is malformed.
uint64_t decode_plane(std::span<const std::byte> coded, std::span<uint8_t> plane) {
  if (coded.empty()) return 0;
  const std::span<const std::byte> rest = coded.subspan(1);
  switch (static_cast<Form>(coded[0])) {
    case Form::raw:
      if (rest.size() < plane.size()) return 0;
      std::memcpy(plane.data(), rest.data(), plane.size());
      return 1 + plane.size();
    case Form::one_byte:
      if (rest.empty()) return 0;
      std::memset(plane.data(), static_cast<int>(rest[0]), plane.size());
      return 2;
    case Form::huffman:
      const uint64_t size_bytes = huffman_decode(rest, plane);
      return size_bytes == 0 ? 0 : 1 + size_bytes;
  }
  return 0;
}

}  // namespace

uint64_t lossless_bytes(uint64_t item_bytes, uint64_t count) {
  return item_bytes * (count + (count + BLOCK - 1) / BLOCK);
}

uint64_t lossless_encode(bool is_float, uint64_t item_bytes, const std::byte* source, uint64_t count,
                         std::byte* destination) {
  uint8_t planes[8 * BLOCK];
  std::byte* to = destination;
  for (uint64_t start = 0; start < count; start += BLOCK) {
    const uint64_t length = std::min(BLOCK, count - start);
    with_word(item_bytes,
              [&](auto word) { split<decltype(word)>(is_float, source + start * item_bytes, length, planes); });
    for (uint64_t plane = 0; plane < item_bytes; ++plane) to += encode_plane({planes + plane * BLOCK, length}, to);
  }
  return static_cast<uint64_t>(to - destination);
}

std::optional<uint64_t> lossless_decode(bool is_float, uint64_t item_bytes, std::span<const std::byte> coded,
                                        uint64_t count, std::byte* destination) {
  const uint64_t given_bytes = coded.size();
  uint8_t planes[8 * BLOCK];
  for (uint64_t start = 0; start < count; start += BLOCK) {
    const uint64_t length = std::min(BLOCK, count - start);
    for (uint64_t plane = 0; plane < item_bytes; ++plane) {
      const uint64_t size_bytes = decode_plane(coded, {planes + plane * BLOCK, length});
      if (size_bytes == 0) return std::nullopt;
      coded = coded.subspan(size_bytes);
    }
    with_word(item_bytes,
              [&](auto word) { merge<decltype(word)>(is_float, planes, length, destination + start * item_bytes); });
  }
  return given_bytes - coded.size();
}

}  // namespace sennit
