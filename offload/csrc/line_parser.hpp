// SPDX-License-Identifier: Apache-2.0
// Lines of text as columns of Arrow, as long as they are plain: without quotes, and with numbers and times as programs
// write them. pyarrow's parser says what text means. This one takes what both read alike, and leaves the rest to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "column.hpp"

namespace sennit::offload {

// The buffers of a column of Arrow.
struct ParsedColumn {
  std::int64_t null_count = 0;
  Buffer<std::uint64_t> valid;   // a bit for each line
  Buffer<std::byte> values;      // numbers, or the bytes of texts
  Buffer<std::int32_t> offsets;  // of texts, [lines + 1]; else nothing
};

class LineParser {
 public:
  struct Column {
    std::size_t place;   // which value of a line, from 0
    std::string format;  // its type, as the Arrow C data interface writes it
  };

  // Whether it parses values of this type.
  static bool knows(std::string_view format);

  // `width`: values of a line. `nulls`: what stands for null, in columns of every type.
  LineParser(char delimiter, std::size_t width, std::vector<std::string> nulls, std::vector<Column> columns);

  const std::vector<Column>& columns() const { return columns_; }

  // Nothing unless the text is so many plain lines, of at most 2 GiB. Text is not checked for being UTF-8.
  std::optional<std::vector<ParsedColumn>> parse(std::string_view text, std::size_t line_count) const;

 private:
  char delimiter_;
  std::size_t width_;
  bool empty_is_null_ = false;
  std::vector<std::string> nulls_;  // others
  std::vector<Column> columns_;
};

}  // namespace sennit::offload
