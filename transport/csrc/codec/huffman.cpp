// SPDX-License-Identifier: Apache-2.0
// A Huffman code (Huffman, "A method for the construction of minimum-redundancy codes", 1952), canonical as in RFC
// 1951, section 3.2.2: the lengths of the codes say everything. Codes begin in the lowest bit that is free.
#include "codec/huffman.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace sennit {
namespace {

// The longest code in bits. With 11 bits the decoder's table is 4 KiB, and one load of 64 bits holds five codes.
constexpr uint32_t MAX_LENGTH = 11;
constexpr uint32_t CODES_A_LOAD = 5;
constexpr uint64_t STREAMS = 4;
constexpr uint64_t SIZES_BYTES = 2 * STREAMS;

using Counts = std::array<uint32_t, 256>;
using Lengths = std::array<uint8_t, 256>;

uint64_t stream_begin(uint64_t stream, uint64_t count) { return std::min(stream * ((count + 3) / STREAMS), count); }

Counts count_bytes(std::span<const uint8_t> bytes) {
  // Several tables, because an addition to a number waits for the one before.
  std::array<Counts, 4> parts{};
  size_t i = 0;
  for (; i + 4 <= bytes.size(); i += 4)
    for (size_t part = 0; part < 4; ++part) ++parts[part][bytes[i + part]];
  for (; i < bytes.size(); ++i) ++parts[0][bytes[i]];
  for (size_t byte = 0; byte < 256; ++byte) parts[0][byte] += parts[1][byte] + parts[2][byte] + parts[3][byte];
  return parts[0];
}

// The lengths of an optimal code. Among nodes of equal weight, bytes come before pairs, lower bytes first and older
// pairs first.
uint32_t find_lengths(const Counts& counts, Lengths& lengths) {
  struct Node {
    uint32_t weight;
    uint16_t parent;
  };
  std::array<Node, 511> nodes;
  // The count, then the byte: a block has fewer than 2^24 bytes.
  std::array<uint32_t, 256> sorted;
  uint32_t leaves = 0;
  for (uint32_t byte = 0; byte < 256; ++byte)
    if (counts[byte] != 0) sorted[leaves++] = counts[byte] << 8 | byte;
  std::sort(sorted.begin(), sorted.begin() + leaves);
  for (uint32_t leaf = 0; leaf < leaves; ++leaf) nodes[leaf].weight = sorted[leaf] >> 8;
  uint32_t leaf = 0, pair = leaves, end = leaves;
  const auto take = [&] {
    return leaf < leaves && (pair == end || nodes[leaf].weight <= nodes[pair].weight) ? leaf++ : pair++;
  };
  for (; end < 2 * leaves - 1; ++end) {
    const uint32_t first = take(), second = take();
    nodes[first].parent = nodes[second].parent = static_cast<uint16_t>(end);
    nodes[end].weight = nodes[first].weight + nodes[second].weight;
  }
  // From the root down: a parent stands behind its children.
  std::array<uint8_t, 511> depth;
  depth[end - 1] = 0;
  uint32_t longest = 0;
  for (uint32_t node = end - 1; node-- > 0;) {
    depth[node] = static_cast<uint8_t>(depth[nodes[node].parent] + 1);
    longest = std::max<uint32_t>(longest, depth[node]);
  }
  lengths.fill(0);
  for (uint32_t i = 0; i < leaves; ++i) lengths[sorted[i] & 255u] = depth[i];
  return longest;
}

// Calls body(byte, length, code), lowest code first; the bits of a code are turned round, so that its first is lowest.
template <class Body>
void for_each_code(const Lengths& lengths, Body body) {
  uint32_t code = 0;
  for (uint32_t length = 1; length <= MAX_LENGTH; ++length, code <<= 1) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      if (lengths[byte] != length) continue;
      uint32_t turned = 0;
      for (uint32_t bit = 0; bit < length; ++bit) turned |= (code >> bit & 1u) << (length - 1 - bit);
      body(byte, length, turned);
      ++code;
    }
  }
}

struct Code {
  uint16_t bits;
  uint16_t length;
};

class Writer {
 public:
  explicit Writer(std::byte* to) : to_(to) {}
  void put(Code code) {
    bits_ |= static_cast<uint64_t>(code.bits) << filled_;
    filled_ += code.length;
  }
  void flush() {
    std::memcpy(to_, &bits_, sizeof bits_);
    to_ += filled_ / 8;
    bits_ >>= filled_ / 8 * 8;
    filled_ %= 8;
  }
  std::byte* end() const { return to_ + (filled_ + 7) / 8; }

 private:
  std::byte* to_;
  uint64_t bits_ = 0;
  uint32_t filled_ = 0;
};

class Reader {
 public:
  Reader() = default;
  explicit Reader(std::span<const std::byte> from) : from_(from) {}
  // At least 56 bits, of which those behind the end are zero.
  void load() {
    uint64_t next = 0;
    if (at_ + sizeof next <= from_.size()) {
      std::memcpy(&next, from_.data() + at_, sizeof next);
    } else if (at_ < from_.size()) {
      std::memcpy(&next, from_.data() + at_, from_.size() - at_);
    }
    bits_ = next >> skipped_;
    used_ = skipped_;
  }
  uint32_t peek() const { return static_cast<uint32_t>(bits_) & ((1u << MAX_LENGTH) - 1); }
  void skip(uint32_t length) {
    bits_ >>= length;
    used_ += length;
  }
  void advance() {
    at_ += used_ / 8;
    skipped_ = used_ % 8;
  }
  bool is_used_up() const { return at_ + (skipped_ != 0) == from_.size(); }

 private:
  std::span<const std::byte> from_;
  size_t at_ = 0;  // may go beyond the end of a malformed stream
  uint64_t bits_ = 0;
  uint32_t skipped_ = 0, used_ = 0;
};

}  // namespace

uint64_t huffman_encode(std::span<const uint8_t> bytes, std::byte* to) {
  Counts counts = count_bytes(bytes);
  // A code takes at least n times the Shannon entropy H of the bytes, and H is at least the collision entropy
  // -log2(sum of squares / n^2). Above 7.75 bits a code cannot save n / 32, so it is not made. This changes no result.
  uint64_t squares = 0;
  for (const uint32_t count : counts) squares += uint64_t{count} * count;
  if (squares * 216 <= bytes.size() * bytes.size()) return 0;
  Lengths lengths;
  const Counts true_counts = counts;
  while (find_lengths(counts, lengths) > MAX_LENGTH)
    for (uint32_t& count : counts) count = (count + 1) / 2;
  uint32_t first = 0, last = 255;
  while (lengths[first] == 0) ++first;
  while (lengths[last] == 0) --last;
  uint64_t bits = 0;
  for (uint32_t byte = first; byte <= last; ++byte) bits += uint64_t{true_counts[byte]} * lengths[byte];
  const uint64_t head_bytes = 2 + (last - first + 2) / 2 + SIZES_BYTES;
  // Each stream ends with a byte that may be filled in part.
  const uint64_t most = head_bytes + bits / 8 + STREAMS, saved = std::max<uint64_t>(8, bytes.size() / 32);
  if (most + saved > bytes.size()) return 0;

  std::array<Code, 256> codes;
  for_each_code(lengths, [&](uint32_t byte, uint32_t length, uint32_t code) {
    codes[byte] = {static_cast<uint16_t>(code), static_cast<uint16_t>(length)};
  });
  to[0] = static_cast<std::byte>(first);
  to[1] = static_cast<std::byte>(last);
  for (uint32_t byte = first; byte <= last; byte += 2) {
    const uint32_t upper = byte < last ? lengths[byte + 1] : 0;
    to[2 + (byte - first) / 2] = static_cast<std::byte>(lengths[byte] | upper << 4);
  }
  std::byte* const sizes = to + head_bytes - SIZES_BYTES;
  std::byte* at = to + head_bytes;
  for (uint64_t stream = 0; stream < STREAMS; ++stream) {
    Writer writer(at);
    uint64_t i = stream_begin(stream, bytes.size());
    const uint64_t end = stream_begin(stream + 1, bytes.size());
    for (; i + CODES_A_LOAD <= end; i += CODES_A_LOAD) {
      for (uint32_t n = 0; n < CODES_A_LOAD; ++n) writer.put(codes[bytes[i + n]]);
      writer.flush();
    }
    for (; i < end; ++i) {
      writer.put(codes[bytes[i]]);
      writer.flush();
    }
    const auto size = static_cast<uint16_t>(writer.end() - at);
    std::memcpy(sizes + 2 * stream, &size, sizeof size);
    at += size;
  }
  return static_cast<uint64_t>(at - to);
}

uint64_t huffman_decode(std::span<const std::byte> coded, std::span<uint8_t> bytes) {
  if (coded.size() < 2 || coded[0] > coded[1]) return 0;
  const auto first = static_cast<uint32_t>(coded[0]), last = static_cast<uint32_t>(coded[1]);
  const uint64_t head_bytes = 2 + (last - first + 2) / 2 + SIZES_BYTES;
  if (coded.size() < head_bytes) return 0;
  Lengths lengths{};
  uint32_t used = 0;
  for (uint32_t byte = first; byte <= last; ++byte) {
    const auto pair = static_cast<uint32_t>(coded[2 + (byte - first) / 2]);
    const uint32_t length = (byte - first) % 2 == 0 ? pair & 15u : pair >> 4;
    if (length > MAX_LENGTH) return 0;
    lengths[byte] = static_cast<uint8_t>(length);
    if (length != 0) used += 1u << (MAX_LENGTH - length);
  }
  // Only a complete code is accepted: then all bits mean something, and every entry of the table is set.
  if (used != 1u << MAX_LENGTH) return 0;
  struct Entry {
    uint8_t byte, length;
  };
  std::array<Entry, 1u << MAX_LENGTH> table;
  for_each_code(lengths, [&](uint32_t byte, uint32_t length, uint32_t code) {
    for (uint32_t bits = code; bits < table.size(); bits += 1u << length)
      table[bits] = {static_cast<uint8_t>(byte), static_cast<uint8_t>(length)};
  });

  std::array<Reader, STREAMS> readers;
  uint64_t at = head_bytes;
  for (uint64_t stream = 0; stream < STREAMS; ++stream) {
    uint16_t size;
    std::memcpy(&size, coded.data() + head_bytes - SIZES_BYTES + 2 * stream, sizeof size);
    if (coded.size() - at < size) return 0;
    readers[stream] = Reader(coded.subspan(at, size));
    at += size;
  }
  const auto take = [&](Reader& reader) {
    const Entry entry = table[reader.peek()];
    reader.skip(entry.length);
    return entry.byte;
  };
  // The last stream is the shortest. As long as it lasts all four go side by side.
  const uint64_t shortest = bytes.size() - stream_begin(STREAMS - 1, bytes.size());
  uint64_t done = 0;
  for (; done + CODES_A_LOAD <= shortest; done += CODES_A_LOAD) {
    for (Reader& reader : readers) reader.load();
    for (uint32_t n = 0; n < CODES_A_LOAD; ++n)
      for (uint64_t stream = 0; stream < STREAMS; ++stream)
        bytes[stream_begin(stream, bytes.size()) + done + n] = take(readers[stream]);
    for (Reader& reader : readers) reader.advance();
  }
  for (uint64_t stream = 0; stream < STREAMS; ++stream) {
    for (uint64_t i = stream_begin(stream, bytes.size()) + done; i < stream_begin(stream + 1, bytes.size()); ++i) {
      readers[stream].load();
      bytes[i] = take(readers[stream]);
      readers[stream].advance();
    }
    if (!readers[stream].is_used_up()) return 0;
  }
  return at;
}

}  // namespace sennit
