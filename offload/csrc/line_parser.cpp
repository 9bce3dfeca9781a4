// SPDX-License-Identifier: Apache-2.0
#include "line_parser.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <chrono>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

#include "arrow_array.hpp"
#include "text_kernels.hpp"

namespace sennit::offload {
namespace {

// Lines that are cut at once: their text and the ends of their values stay in the first caches. A multiple of 64, so
// that they have whole words of validity bits.
constexpr std::size_t LINES_AT_ONCE = 128;
constexpr std::size_t COPY_BYTES = 16;

using Text = std::string_view;

bool is_digit(char sign) { return sign >= '0' && sign <= '9'; }

// Up to 8 digits that end at `end`, of a text that has at least 8 bytes before it (Langdale and Lemire, section 3.2.2,
// with zeros for what is before the value).
bool few_digits(const char* end, std::size_t count, std::uint64_t& value) {
  constexpr std::uint64_t ZEROS = 0x3030303030303030;
  std::uint64_t word;
  std::memcpy(&word, end - 8, 8);
  const std::uint64_t own = ~std::uint64_t{0} << (64 - 8 * count);
  word = (word & own) | (ZEROS & ~own);
  if (((word & 0xf0f0f0f0f0f0f0f0) | (((word + 0x0606060606060606) & 0xf0f0f0f0f0f0f0f0) >> 4)) != 0x3333333333333333)
    return false;
  word -= ZEROS;
  word = word * 10 + (word >> 8);
  value =
      ((word & 0x000000ff000000ff) * 0x000f424000000064 + ((word >> 16 & 0x000000ff000000ff) * 0x0000271000000001)) >>
      32;
  return true;
}

// Any number of digits that 64 bits have.
bool digits(Text text, std::uint64_t& value) {
  value = 0;
  if (text.empty() || text.size() > std::numeric_limits<std::uint64_t>::digits10) return false;
  for (const char sign : text) {
    if (!is_digit(sign)) return false;
    value = value * 10 + static_cast<std::uint64_t>(sign - '0');
  }
  return true;
}

template <typename Integer>
bool read(Text text, Integer& value) {
  const bool is_negative = text.front() == '-';
  std::uint64_t magnitude = 0;
  if (!digits(text.substr(is_negative), magnitude)) return false;
  const auto most = static_cast<std::uint64_t>(std::numeric_limits<Integer>::max());
  if (is_negative) {
    if (std::is_unsigned_v<Integer> || magnitude > most) return false;
    value = static_cast<Integer>(-static_cast<std::int64_t>(magnitude));
    return true;
  }
  value = static_cast<Integer>(magnitude);
  return magnitude <= most;
}

// Both factors are exact where there are few digits, so one operation rounds correctly (Clinger, "How to read floating
// point numbers accurately", PLDI 1990).
bool read(Text text, double& value) {
  constexpr std::array<double, 16> POWERS{1e0, 1e1, 1e2,  1e3,  1e4,  1e5,  1e6,  1e7,
                                          1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
  constexpr std::size_t EXACT_DIGITS = std::numeric_limits<double>::digits10;
  const bool is_negative = text.front() == '-';
  const Text plain = text.substr(is_negative);
  if (plain.empty() || !is_digit(plain.front())) return false;
  const std::size_t point = plain.find('.');
  const Text before = plain.substr(0, point), behind = point == Text::npos ? Text() : plain.substr(point + 1);
  std::uint64_t whole = 0, part = 0;
  if (before.size() + behind.size() <= EXACT_DIGITS && digits(before, whole) &&
      (point == Text::npos || digits(behind, part))) {
    for (std::size_t i = 0; i < behind.size(); i++) whole *= 10;
    const auto magnitude = static_cast<double>(whole + part) / POWERS[behind.size()];
    value = is_negative ? -magnitude : magnitude;
    return true;
  }
#if defined(__cpp_lib_to_chars)
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
#else
  return false;
#endif
}

bool two_digits(const char* at, unsigned& value) {
  value = static_cast<unsigned>((at[0] - '0') * 10 + (at[1] - '0'));
  return is_digit(at[0]) && is_digit(at[1]);
}

// ISO 8601: 2026-11-28.
bool day_of(const char* at, std::int64_t& days) {
  unsigned century = 0, year = 0, month = 0, day = 0;
  if (!two_digits(at, century) || !two_digits(at + 2, year) || at[4] != '-' || !two_digits(at + 5, month) ||
      at[7] != '-' || !two_digits(at + 8, day))
    return false;
  const std::chrono::year_month_day date{std::chrono::year(static_cast<int>(century * 100 + year)),
                                         std::chrono::month(month), std::chrono::day(day)};
  if (!date.ok()) return false;
  days = std::chrono::sys_days(date).time_since_epoch().count();
  return true;
}

struct Day {
  std::int32_t days;
};

bool read(Text text, Day& value) {
  std::int64_t days = 0;
  if (text.size() != 10 || !day_of(text.data(), days)) return false;
  value.days = static_cast<std::int32_t>(days);
  return true;
}

// 2026-11-28, or with the time: 2026-11-28 06:30:00, 2026-11-28T06:30:00.
template <std::int64_t per_second>
struct Moment {
  std::int64_t units;
};

template <std::int64_t per_second>
bool read(Text text, Moment<per_second>& value) {
  const char* at = text.data();
  std::int64_t days = 0;
  unsigned hour = 0, minute = 0, second = 0;
  if ((text.size() != 10 && text.size() != 19) || !day_of(at, days)) return false;
  if (text.size() == 19 && ((at[10] != ' ' && at[10] != 'T') || !two_digits(at + 11, hour) || at[13] != ':' ||
                            !two_digits(at + 14, minute) || at[16] != ':' || !two_digits(at + 17, second)))
    return false;
  if (hour > 23 || minute > 59 || second > 59) return false;
  value.units = (days * 86'400 + hour * 3'600 + minute * 60 + second) * per_second;
  return true;
}

// Calls `use` with a null pointer to the type of the values of this format, unless they are texts.
template <typename Use>
bool with_values(std::string_view format, Use use) {
  if (format == "g") return use(static_cast<const double*>(nullptr)), true;
  if (format == "tdD") return use(static_cast<const Day*>(nullptr)), true;
  if (format == "tss:") return use(static_cast<const Moment<1>*>(nullptr)), true;
  if (format == "tsm:") return use(static_cast<const Moment<1'000>*>(nullptr)), true;
  if (format == "tsu:") return use(static_cast<const Moment<1'000'000>*>(nullptr)), true;
  return with_integers(format, use);
}

// Whether the last value of a line has a '\r' that is a part of the end of the line. `end`: of the text.
bool has_return(Text value, const char* end) {
  return !value.empty() && value.back() == '\r' && value.data() + value.size() != end;
}

// The ends of values, some lines at a time.
class Cutter {
 public:
  Cutter(Text text, char delimiter, std::size_t width)
      : text_(text),
        delimiter_(delimiter),
        width_(width),
        is_open_(text.back() != '\n'),
        memory_(1 + LINES_AT_ONCE * width + 2 * BLOCK) {
    memory_.front() = std::numeric_limits<std::uint32_t>::max();  // one before the first byte
  }

  // Cuts the next lines. False unless each has `width` values.
  bool next(std::size_t lines) {
    std::uint32_t* const ends = memory_.data() + 1;
    // Those of the last line before are still there, and perhaps some behind it.
    if (lines_ > 0) {
      const std::size_t used = lines_ * width_;
      std::copy(ends + used - 1, ends + found_, ends - 1);
      found_ -= used;
    }
    while (found_ < lines * width_ && at_ < text_.size() + is_open_) add(ends);
    lines_ = lines;
    return found_ >= lines * width_ && are_whole();
  }

  // The values of one place, by line. It has copies of what it needs: the compiler cannot know what stores change.
  struct Values {
    const char* text;
    const std::uint32_t* ends;
    std::size_t width;
    const char* returns_until;  // null: a '\r' is a part of the value

    // The begin is behind the end of the value before.
    Text operator()(std::size_t line) const {
      const std::uint32_t* const end = ends + line * width;
      const std::uint32_t begin = end[-1] + 1;
      const Text found(text + begin, *end - begin);
      return returns_until != nullptr && has_return(found, returns_until) ? found.substr(0, found.size() - 1) : found;
    }
  };
  Values values(std::size_t place) const {
    return {text_.data(), memory_.data() + 1 + place, width_,
            returns_ > 0 && place == width_ - 1 ? text_.data() + text_.size() : nullptr};
  }

  // Whether there is no text behind the lines.
  bool has_ended() const { return at_ >= text_.size() + is_open_ && found_ == lines_ * width_; }
  std::size_t newlines() const { return newlines_; }
  // Whether every '\r' is before the '\n' of a line.
  bool are_returns_at_ends() const { return returns_ == ended_; }

 private:
  static constexpr std::size_t BLOCK = TextKernels::BLOCK_BYTES;

  void add(std::uint32_t* ends) {
    const std::size_t left = text_.size() - at_;
    const auto first = static_cast<std::uint32_t>(at_);
    Cuts cuts;
    if (left >= BLOCK) {
      cuts = kernels_.cut(text_.data() + at_, delimiter_, first, ends + found_);
    } else {
      std::array<char, BLOCK> block{};
      std::copy_n(text_.data() + at_, left, block.data());
      if (is_open_) block[left] = '\n';
      cuts = kernels_.cut(block.data(), delimiter_, first, ends + found_);
    }
    at_ += BLOCK;
    found_ += cuts.ends;
    newlines_ += cuts.newlines;
    returns_ += cuts.returns;
  }

  bool are_whole() {
    const char* const end = text_.data() + text_.size();
    const Values last{text_.data(), memory_.data() + width_, width_, nullptr};
    for (std::size_t line = 0; line < lines_; line++) {
      const Text found = last(line);
      const char* const behind = found.data() + found.size();
      if (behind != end && *behind != '\n') return false;
      const bool has = has_return(found, end);
      ended_ += has;
      // An empty line is no row.
      if (width_ == 1 && found.size() == has) return false;
    }
    return true;
  }

  const TextKernels& kernels_ = text_kernels();
  Text text_;
  char delimiter_;
  std::size_t width_;
  bool is_open_;  // whether the last line has no end
  std::size_t at_ = 0, found_ = 0, lines_ = 0;
  std::size_t newlines_ = 0, returns_ = 0, ended_ = 0;
  // In front of the ends of these lines, that of the line before.
  std::vector<std::uint32_t> memory_;
};

// Values of one column, some lines at a time.
class Filler {
 public:
  Filler(const LineParser::Column& column, std::size_t lines, Text text)
      : place_(column.place), format_(column.format), lines_(lines), text_(text) {
    out_.valid = buffer<std::uint64_t>((lines + 63) / 64);
    if (is_text(format_)) {
      out_.offsets = buffer<std::int32_t>(lines + 1);
      out_.offsets->front() = 0;
      out_.values = buffer<std::byte>(8 * lines + COPY_BYTES);
    } else {
      with_values(format_,
                  [&]<typename Value>(const Value*) { out_.values = buffer<std::byte>(lines * sizeof(Value)); });
    }
  }

  // `is_null(value)`. False for a value that is not plain.
  template <typename IsNull>
  bool add(const Cutter& cutter, std::size_t count, IsNull is_null) {
    const Cutter::Values values = cutter.values(place_);
    bool is_fine = true;
    if (is_text(format_))
      add_texts(count, values, is_null);
    else
      with_values(format_, [&]<typename Value>(const Value*) { is_fine = add_values<Value>(count, values, is_null); });
    done_ += count;
    return is_fine;
  }

  ParsedColumn take() {
    out_.null_count = static_cast<std::int64_t>(lines_ - valid_);
    return std::move(out_);
  }

 private:
  template <typename IsNull>
  void add_texts(std::size_t count, const Cutter::Values values, IsNull is_null) {
    std::int32_t* const offsets = out_.offsets->data() + done_ + 1;
    std::byte* bytes = out_.values->data();
    std::size_t used = static_cast<std::size_t>(offsets[-1]), room = out_.values->size();
    const char* const end = text_.data() + text_.size();
    for (std::size_t first = 0; first < count; first += 64) {
      std::uint64_t valid = 0;
      for (std::size_t line = first; line < std::min(count, first + 64); line++) {
        const Text value = values(line);
        const bool is_there = !is_null(value);
        const std::size_t size = is_there ? value.size() : 0;
        if (used + size + COPY_BYTES > room) {
          grow(used, size);
          bytes = out_.values->data(), room = out_.values->size();
        }
        if (size <= COPY_BYTES && static_cast<std::size_t>(end - value.data()) >= COPY_BYTES)
          std::memcpy(bytes + used, value.data(), COPY_BYTES);  // of a known size, it is two instructions
        else
          std::memcpy(bytes + used, value.data(), size);
        used += size;
        offsets[line] = static_cast<std::int32_t>(used);
        valid |= std::uint64_t{is_there} << (line - first);
      }
      keep(first, valid);
    }
  }

  template <typename Value, typename IsNull>
  bool add_values(std::size_t count, const Cutter::Values values, IsNull is_null) {
    Value* const to = reinterpret_cast<Value*>(out_.values->data()) + done_;
    const char* const begin = text_.data();
    for (std::size_t first = 0; first < count; first += 64) {
      std::uint64_t valid = 0;
      for (std::size_t line = first; line < std::min(count, first + 64); line++) {
        const Text value = values(line);
        if (is_null(value)) {
          to[line] = Value{};
          continue;
        }
        valid |= std::uint64_t{1} << (line - first);
        if constexpr (std::is_arithmetic_v<Value>) {
          std::uint64_t few = 0;
          const char* const end = value.data() + value.size();
          if (value.size() - 1 < 8 && end - begin >= 8 && few_digits(end, value.size(), few) &&
              (sizeof(Value) == 8 || few <= static_cast<std::uint64_t>(std::numeric_limits<Value>::max()))) {
            to[line] = static_cast<Value>(few);
            continue;
          }
        }
        if (value.empty() || !read(value, to[line])) return false;
      }
      keep(first, valid);
    }
    return true;
  }

  void keep(std::size_t first, std::uint64_t valid) {
    (*out_.valid)[(done_ + first) / 64] = valid;
    valid_ += static_cast<std::size_t>(std::popcount(valid));
  }

  void grow(std::size_t used, std::size_t size) {
    auto larger = buffer<std::byte>(2 * (used + size + COPY_BYTES));
    std::copy_n(out_.values->data(), used, larger->data());
    out_.values = std::move(larger);
  }

  std::size_t place_;
  std::string_view format_;
  std::size_t lines_, done_ = 0, valid_ = 0;
  Text text_;
  ParsedColumn out_;
};

}  // namespace

bool LineParser::knows(std::string_view format) {
  return format == "u" || with_values(format, [](auto) {});
}

LineParser::LineParser(char delimiter, std::size_t width, std::vector<std::string> nulls, std::vector<Column> columns)
    : delimiter_(delimiter), width_(width), columns_(std::move(columns)) {
  for (std::string& null : nulls) {
    if (null.empty())
      empty_is_null_ = true;
    else
      nulls_.push_back(std::move(null));
  }
  for (const Column& column : columns_)
    if (!knows(column.format) || column.place >= width_)
      throw std::invalid_argument("value " + std::to_string(column.place) + " of " + std::to_string(width_) +
                                  " with the type " + column.format + "; allowed: a type that it knows");
}

std::optional<std::vector<ParsedColumn>> LineParser::parse(std::string_view text, std::size_t line_count) const {
  if (line_count == 0 || text.size() < line_count - 1 || text.empty() ||
      text.size() > std::numeric_limits<std::int32_t>::max())
    return std::nullopt;
  std::vector<Filler> fillers;
  for (const Column& column : columns_) fillers.emplace_back(column, line_count, text);
  Cutter cutter(text, delimiter_, width_);
  const auto add_all = [&](std::size_t count, auto is_null) {
    for (Filler& filler : fillers)
      if (!filler.add(cutter, count, is_null)) return false;
    return true;
  };
  const auto is_empty_null = [](Text value) { return value.empty(); };
  const auto is_any_null = [&](Text value) {
    return (empty_is_null_ && value.empty()) || std::ranges::find(nulls_, value) != nulls_.end();
  };
  for (std::size_t done = 0; done < line_count;) {
    const std::size_t count = std::min(LINES_AT_ONCE, line_count - done);
    if (!cutter.next(count)) return std::nullopt;
    if (!(empty_is_null_ && nulls_.empty() ? add_all(count, is_empty_null) : add_all(count, is_any_null)))
      return std::nullopt;
    done += count;
  }
  if (!cutter.has_ended() || cutter.newlines() != line_count || !cutter.are_returns_at_ends()) return std::nullopt;
  std::vector<ParsedColumn> found;
  for (Filler& filler : fillers) found.push_back(filler.take());
  return found;
}

}  // namespace sennit::offload
