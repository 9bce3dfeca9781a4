// SPDX-License-Identifier: Apache-2.0
#include "flow/control.hpp"

#include <algorithm>
#include <bit>

#include "flow/immediate.hpp"

namespace sennit::flow {
namespace {

static_assert(std::endian::native == std::endian::little, "the control payload is written as the host holds it");

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename T>
void store(std::byte* at, T value) {
  std::memcpy(at, &value, sizeof value);
}

constexpr uint32_t more_keys(uint32_t part) { return (part & ~ADVERT_FIRST_PART) >> ADVERT_MORE_KEYS_SHIFT; }
static_assert(more_keys(UINT32_MAX) + 1 == Keys::MAX_COUNT);

}  // namespace

void ControlWriter::put(const void* data, size_t size) {
  std::memcpy(out_.data() + used_, data, size);
  used_ += size;
}

void ControlWriter::add_done_word(uint64_t word) {
  put(&word, 8);
  ++header.done_words;
}

void ControlWriter::add_eager_word(uint64_t word) {
  put(&word, 8);
  ++header.eager_words;
}

bool ControlWriter::add_echo(const Echo& echo) {
  if (room() < ECHO_BYTES) return false;
  const uint32_t delay = std::min(echo.delay_us, ECHO_DELAY_MAX_US) | uint32_t{echo.path} << 24;
  constexpr uint16_t RESERVED = 0;
  put(&echo.immediate, 4);
  put(&delay, 4);
  put(&echo.received, 2);
  put(&echo.marked, 2);
  put(&echo.waited_us, 2);
  put(&RESERVED, 2);
  ++header.echo_count;
  return true;
}

bool ControlWriter::begin_sack(uint32_t credit, uint32_t first_missing, uint32_t word_count) {
  if (room() < SACK_HEADER_BYTES + size_t{word_count} * 8) return false;
  put(&credit, 4);
  put(&first_missing, 4);
  put(&word_count, 4);
  ++header.sack_count;
  return true;
}

void ControlWriter::add_sack_word(uint64_t word) { put(&word, 8); }

bool ControlWriter::add_advert(const Advert& advert) {
  const uint32_t more_keys = advert.keys.count - 1;
  if (room() < ADVERT_BYTES + (advert.first_part ? ADVERT_MESSAGE_BYTES : 0) + more_keys * sizeof(uint32_t))
    return false;
  const uint32_t part =
      advert.part_bytes | more_keys << ADVERT_MORE_KEYS_SHIFT | (advert.first_part ? ADVERT_FIRST_PART : 0);
  put(&advert.address, 8);
  put(&advert.keys.of[0], 4);
  put(&part, 4);
  if (advert.first_part) {
    put(&advert.key, 8);
    put(&advert.signature, 8);
    put(&advert.message_bytes, 8);
  }
  put(&advert.keys.of[1], more_keys * sizeof(uint32_t));
  ++header.advert_count;
  return true;
}

void ControlWriter::add_reason(std::string_view reason) {
  put(reason.data(), reason.size());
  header.reason_bytes = static_cast<uint16_t>(reason.size());
}

size_t ControlWriter::finish() {
  std::byte* at = out_.data();
  store<uint8_t>(at, CONTROL_VERSION);
  store<uint8_t>(at + 1, header.flags);
  store<uint8_t>(at + 2, header.done_words);
  store<uint8_t>(at + 3, header.eager_words);
  store<uint16_t>(at + 4, header.sack_count);
  store<uint16_t>(at + 6, header.echo_count);
  store<uint16_t>(at + 8, header.advert_count);
  store<uint16_t>(at + 10, header.reason_bytes);
  store<uint32_t>(at + 12, header.completed_below);
  store<uint32_t>(at + 16, header.credits_seen);
  store<uint32_t>(at + 20, header.eager_received);
  store<uint32_t>(at + 24, header.eager_consumed);
  store<uint32_t>(at + 28, header.advert_first);
  store<uint32_t>(at + 32, header.granted);
  store<uint16_t>(at + 36, header.queue_us);
  store<uint16_t>(at + 38, header.probe_number);
  return used_;
}

bool ControlReader::parse(std::span<const std::byte> payload) {
  if (payload.size() < CONTROL_HEADER_BYTES) return false;
  const std::byte* at = payload.data();
  const std::byte* const end = at + payload.size();
  if (load<uint8_t>(at) != CONTROL_VERSION) return false;
  header_.flags = load<uint8_t>(at + 1);
  header_.done_words = load<uint8_t>(at + 2);
  header_.eager_words = load<uint8_t>(at + 3);
  header_.sack_count = load<uint16_t>(at + 4);
  header_.echo_count = load<uint16_t>(at + 6);
  header_.advert_count = load<uint16_t>(at + 8);
  header_.reason_bytes = load<uint16_t>(at + 10);
  header_.completed_below = load<uint32_t>(at + 12);
  header_.credits_seen = load<uint32_t>(at + 16);
  header_.eager_received = load<uint32_t>(at + 20);
  header_.eager_consumed = load<uint32_t>(at + 24);
  header_.advert_first = load<uint32_t>(at + 28);
  header_.granted = load<uint32_t>(at + 32);
  header_.queue_us = load<uint16_t>(at + 36);
  header_.probe_number = load<uint16_t>(at + 38);
  at += CONTROL_HEADER_BYTES;

  const auto take = [&](size_t size) {
    const bool fits = static_cast<size_t>(end - at) >= size;
    if (fits) at += size;
    return fits;
  };
  const std::byte* section = at;
  if (header_.done_words > CREDIT_WINDOW_WORDS || !take(size_t{header_.done_words} * 8)) return false;
  done_ = WordView(section, header_.done_words);
  section = at;
  if (!take(size_t{header_.eager_words} * 8)) return false;
  eager_ = WordView(section, header_.eager_words);
  echoes_ = at;
  if (!take(header_.echo_count * ECHO_BYTES)) return false;
  sacks_ = at;
  for (uint32_t i = 0; i < header_.sack_count; ++i) {
    const std::byte* sack = at;
    if (!take(SACK_HEADER_BYTES)) return false;
    const auto words = load<uint32_t>(sack + 8);
    if (words > SACK_MAX_WORDS || !take(size_t{words} * 8)) return false;
  }
  adverts_ = at;
  for (uint32_t i = 0; i < header_.advert_count; ++i) {
    const std::byte* advert = at;
    if (!take(ADVERT_BYTES)) return false;
    const auto part = load<uint32_t>(advert + 12);
    if ((part & ADVERT_FIRST_PART) != 0 && !take(ADVERT_MESSAGE_BYTES)) return false;
    if (!take(more_keys(part) * sizeof(uint32_t))) return false;
  }
  const auto* text = reinterpret_cast<const char*>(at);
  if (header_.reason_bytes > REASON_MAX_BYTES || !take(header_.reason_bytes)) return false;
  reason_ = std::string_view(text, header_.reason_bytes);
  return at == end;
}

Echo ControlReader::echo(uint32_t index) const {
  const std::byte* at = echoes_ + index * ECHO_BYTES;
  const auto delay = load<uint32_t>(at + 4);
  return Echo{load<uint32_t>(at),     delay & ECHO_DELAY_MAX_US, static_cast<uint8_t>(delay >> 24),
              load<uint16_t>(at + 8), load<uint16_t>(at + 10),   load<uint16_t>(at + 12)};
}

Sack ControlReader::read_sack(const std::byte*& at) {
  const auto words = load<uint32_t>(at + 8);
  const Sack sack{load<uint32_t>(at), load<uint32_t>(at + 4), WordView(at + SACK_HEADER_BYTES, words)};
  at += SACK_HEADER_BYTES + size_t{words} * 8;
  return sack;
}

Advert ControlReader::read_advert(const std::byte*& at) {
  const auto part = load<uint32_t>(at + 12);
  Advert advert{
      load<uint64_t>(at), load<uint32_t>(at + 8), part & ADVERT_PART_MASK, (part & ADVERT_FIRST_PART) != 0, 0, 0, 0};
  advert.keys.count += more_keys(part);
  at += ADVERT_BYTES;
  if (advert.first_part) {
    advert.key = load<uint64_t>(at);
    advert.signature = load<uint64_t>(at + 8);
    advert.message_bytes = load<uint64_t>(at + 16);
    at += ADVERT_MESSAGE_BYTES;
  }
  for (uint32_t key = 1; key < advert.keys.count; ++key, at += sizeof(uint32_t))
    advert.keys.of[key] = load<uint32_t>(at);
  return advert;
}

}  // namespace sennit::flow
