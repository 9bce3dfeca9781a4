// SPDX-License-Identifier: Apache-2.0
// The control payload: what one side tells the other about credits, arrivals and the end.
//
// Every field is cumulative or idempotent, so that a control packet may be lost, repeated or overtaken.
// Byte table: docs/reference/wire.md, "Control payload". Little-endian.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "flow/message.hpp"

namespace sennit::flow {

inline constexpr uint8_t CONTROL_VERSION = 4;
inline constexpr size_t CONTROL_HEADER_BYTES = 40;
inline constexpr size_t SACK_HEADER_BYTES = 12;
inline constexpr size_t ECHO_BYTES = 16;
inline constexpr size_t ADVERT_BYTES = 16;
inline constexpr size_t ADVERT_MESSAGE_BYTES = 24;
inline constexpr uint32_t ADVERT_FIRST_PART = 0x8000'0000;
inline constexpr uint32_t ADVERT_MORE_KEYS_SHIFT = 28;  // three bits
inline constexpr uint32_t ADVERT_PART_MASK = (1u << ADVERT_MORE_KEYS_SHIFT) - 1;
inline constexpr size_t REASON_MAX_BYTES = 512;

enum ControlFlags : uint8_t {
  CONTROL_ASK = 0x01,         // answer with a control at once
  CONTROL_ADVERT_GAP = 0x02,  // adverts after `credits_seen` arrived, but not the next one: send again
  CONTROL_GOODBYE = 0x04,     // orderly end; nothing follows
  CONTROL_ABORT = 0x08,       // the end; `reason` says why
  CONTROL_PROBE = 0x10,       // asks whether this path is alive; the echo is the answer
  CONTROL_SHORT = 0x20,       // a message that its sender asked for has no credit: give back those not in use
};

struct ControlHeader {
  uint8_t flags = 0;
  uint8_t done_words = 0;   // 64-bit words: bit i is credit completed_below + 1 + i
  uint8_t eager_words = 0;  // 64-bit words: bit i is eager packet eager_received + 1 + i
  uint16_t sack_count = 0;
  uint16_t echo_count = 0;
  uint16_t advert_count = 0;
  uint16_t reason_bytes = 0;
  uint32_t completed_below = 0;  // all credits below are complete
  uint32_t credits_seen = 0;     // all adverts below have arrived
  uint32_t eager_received = 0;   // all eager packets below have arrived
  uint32_t eager_consumed = 0;   // all eager packets below have been taken by the message layer
  uint32_t advert_first = 0;     // credit number of the first advert here
  uint32_t granted = 0;          // how many bulk packets may be sent, counted from the start
  uint16_t probe_number = 0;     // with CONTROL_PROBE
  // Newest standing queue in the fabric towards the peer (PathFeedback). 0: nothing new. QUEUE_OVERFLOWED_US: a queue
  // lost packets.
  uint16_t queue_us = 0;
};

// What the receiver says about one path: its newest data packet, how long the answer to it was held back (which gives a
// round-trip sample), and the counts of arrivals so far, modulo 2^16. Counts make a lost echo harmless.
struct Echo {
  uint32_t immediate;  // of the newest packet; for a probe, ECHO_PROBE
  uint32_t delay_us;   // 24 bits
  uint8_t path;
  uint16_t received;   // packets, probes and duplicates included
  uint16_t marked;     // of them with the ECN codepoint "congestion experienced"
  uint16_t waited_us;  // the time that the packet spent inside the receiving host
};
inline constexpr uint16_t QUEUE_OVERFLOWED_US = UINT16_MAX;
// The newest packet of the path was a probe, whose number is in the low half. No data packet has such an immediate,
// because its index would be beyond the last packet of any credit.
inline constexpr uint32_t ECHO_PROBE = 0xFFFF'0000;
inline constexpr uint32_t ECHO_DELAY_MAX_US = 0xFF'FFFF;

struct Advert {
  uint64_t address;
  Keys keys;
  uint32_t part_bytes;
  bool first_part;
  uint64_t key, signature, message_bytes;  // first part only; later parts continue the same message
};

// 64-bit words in a packet, possibly unaligned.
class WordView {
 public:
  WordView() = default;
  WordView(const std::byte* data, uint32_t count) : data_(data), count_(count) {}
  uint32_t count() const { return count_; }
  uint64_t operator[](uint32_t index) const {
    uint64_t word;
    std::memcpy(&word, data_ + size_t{index} * 8, 8);
    return word;
  }

 private:
  const std::byte* data_ = nullptr;
  uint32_t count_ = 0;
};

struct Sack {
  uint32_t credit;
  uint32_t first_missing;
  WordView words;  // bit 0 of word 0 is packet first_missing & ~63
};

// Fills one control payload from front to back, in the order of the byte table. If an entry does not fit, the call
// returns false and leaves the payload unchanged.
class ControlWriter {
 public:
  explicit ControlWriter(std::span<std::byte> out) : out_(out) {}
  ControlHeader header;
  size_t room() const { return out_.size() - used_; }
  void add_done_word(uint64_t word);
  void add_eager_word(uint64_t word);
  bool add_echo(const Echo& echo);
  // Followed by `word_count` calls of add_sack_word.
  bool begin_sack(uint32_t credit, uint32_t first_missing, uint32_t word_count);
  void add_sack_word(uint64_t word);
  bool add_advert(const Advert& advert);
  void add_reason(std::string_view reason);
  size_t finish();

 private:
  void put(const void* data, size_t size);
  std::span<std::byte> out_;
  size_t used_ = CONTROL_HEADER_BYTES;
};

// Reads a payload. `parse` checks its whole structure first, so that the other calls need no checks.
class ControlReader {
 public:
  bool parse(std::span<const std::byte> payload);
  const ControlHeader& header() const { return header_; }
  WordView done() const { return done_; }
  WordView eager() const { return eager_; }
  std::string_view reason() const { return reason_; }
  Echo echo(uint32_t index) const;
  // Each walk visits the entries until `visit` returns false. Returns whether it visited all.
  template <typename Visit>
  bool each_sack(Visit visit) const {
    const std::byte* at = sacks_;
    for (uint32_t i = 0; i < header_.sack_count; ++i)
      if (!visit(read_sack(at))) return false;
    return true;
  }
  template <typename Visit>
  bool each_advert(Visit visit) const {
    const std::byte* at = adverts_;
    for (uint32_t i = 0; i < header_.advert_count; ++i)
      if (!visit(i, read_advert(at))) return false;
    return true;
  }

 private:
  static Sack read_sack(const std::byte*& at);
  static Advert read_advert(const std::byte*& at);
  ControlHeader header_;
  WordView done_, eager_;
  const std::byte* echoes_ = nullptr;
  const std::byte* sacks_ = nullptr;
  const std::byte* adverts_ = nullptr;
  std::string_view reason_;
};

}  // namespace sennit::flow
