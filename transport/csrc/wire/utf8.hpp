// SPDX-License-Identifier: Apache-2.0
// Texts that cross a process border. Python refuses a string that is not UTF-8 (RFC 3629), and would lose the error
// that contains the text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace sennit {

// At most `max_bytes` of `text`, never cut within a character.
constexpr std::string_view utf8_prefix(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  while (max_bytes > 0 && (static_cast<uint8_t>(text[max_bytes]) & 0xC0) == 0x80) --max_bytes;
  return text.substr(0, max_bytes);
}

// Returns the bytes of the first character of `text`. 0: there is none, or it is NUL, which would end a C string.
constexpr size_t utf8_character_bytes(std::string_view text) {
  struct Form {
    uint8_t mask, lead;
    uint32_t least;  // lower values have a shorter form
  };
  constexpr Form FORMS[] = {{0x80, 0x00, 0x1}, {0xE0, 0xC0, 0x80}, {0xF0, 0xE0, 0x800}, {0xF8, 0xF0, 0x1'0000}};
  const auto at = [&](size_t index) { return static_cast<uint8_t>(text[index]); };
  for (size_t more = 0; more < std::size(FORMS) && more < text.size(); ++more) {
    const Form& form = FORMS[more];
    if ((at(0) & form.mask) != form.lead) continue;
    uint32_t point = at(0) & static_cast<uint8_t>(~form.mask);
    for (size_t index = 1; index <= more; ++index) {
      if ((at(index) & 0xC0) != 0x80) return 0;
      point = point << 6 | (at(index) & 0x3F);
    }
    const bool is_surrogate = point >= 0xD800 && point <= 0xDFFF;
    return point < form.least || point > 0x10'FFFF || is_surrogate ? 0 : more + 1;
  }
  return 0;
}

// Returns the text with a question mark in place of every byte that belongs to no character.
inline std::string repaired_utf8(std::string_view text) {
  std::string repaired;
  repaired.reserve(text.size());
  while (!text.empty()) {
    const size_t size_bytes = utf8_character_bytes(text);
    repaired.append(size_bytes == 0 ? "?" : text.substr(0, size_bytes));
    text.remove_prefix(size_bytes == 0 ? 1 : size_bytes);
  }
  return repaired;
}

}  // namespace sennit
