// SPDX-License-Identifier: Apache-2.0
// Columns of Apache Arrow, read where they lie. The structures are those of the Arrow C data interface, whose layout is
// fixed (https://arrow.apache.org/docs/format/CDataInterface.html), so no library of Arrow is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace sennit::offload {

struct ArrowSchema {
  const char* format;
  const char* name;
  const char* metadata;
  std::int64_t flags;
  std::int64_t n_children;
  ArrowSchema** children;
  ArrowSchema* dictionary;
  void (*release)(ArrowSchema*);
  void* private_data;
};

struct ArrowArray {
  std::int64_t length;
  std::int64_t null_count;  // -1: not known
  std::int64_t offset;
  std::int64_t n_buffers;
  std::int64_t n_children;
  const void** buffers;
  ArrowArray** children;
  ArrowArray* dictionary;
  void (*release)(ArrowArray*);
  void* private_data;
};

// Where the values of an array are null, by their index in its buffers.
class Nulls {
 public:
  explicit Nulls(const ArrowArray& array)
      : bits_(array.null_count != 0 && array.n_buffers > 0 ? static_cast<const std::uint8_t*>(array.buffers[0])
                                                           : nullptr) {}

  bool none() const { return bits_ == nullptr; }
  bool operator()(std::size_t index) const { return bits_ != nullptr && (bits_[index / 8] >> index % 8 & 1) == 0; }

 private:
  const std::uint8_t* bits_;
};

template <typename Element>
const Element* elements(const ArrowArray& array, int buffer = 1) {
  return static_cast<const Element*>(array.buffers[buffer]);
}

// Calls `use` with a null pointer to the C type of the numbers of this format. Returns whether they are such numbers.
template <typename Use>
bool with_integers(std::string_view format, Use use) {
  if (format.size() != 1) return false;
  switch (format[0]) {
    case 'c':
      use(static_cast<const std::int8_t*>(nullptr));
      return true;
    case 'C':
      use(static_cast<const std::uint8_t*>(nullptr));
      return true;
    case 's':
      use(static_cast<const std::int16_t*>(nullptr));
      return true;
    case 'S':
      use(static_cast<const std::uint16_t*>(nullptr));
      return true;
    case 'i':
      use(static_cast<const std::int32_t*>(nullptr));
      return true;
    case 'I':
      use(static_cast<const std::uint32_t*>(nullptr));
      return true;
    case 'l':
      use(static_cast<const std::int64_t*>(nullptr));
      return true;
    case 'L':
      use(static_cast<const std::uint64_t*>(nullptr));
      return true;
    default:
      return false;
  }
}

template <typename Use>
bool with_numbers(std::string_view format, Use use) {
  if (format == "f") {
    use(static_cast<const float*>(nullptr));
    return true;
  }
  if (format == "g") {
    use(static_cast<const double*>(nullptr));
    return true;
  }
  return with_integers(format, use);
}

inline bool is_text(std::string_view format) { return format == "u" || format == "U"; }

// The text of an array of strings.
template <typename Offset>
class Texts {
 public:
  explicit Texts(const ArrowArray& array) : offsets_(elements<Offset>(array)), bytes_(elements<char>(array, 2)) {}

  std::string_view operator[](std::size_t index) const {
    return {bytes_ + offsets_[index], static_cast<std::size_t>(offsets_[index + 1] - offsets_[index])};
  }

  // Where a text begins in the bytes of all.
  Offset begin(std::size_t index) const { return offsets_[index]; }
  const char* bytes() const { return bytes_; }

  // Whether each of the texts [first, end) has 8 bytes, or is null and has none. Then they are one behind the other.
  bool have_8_bytes(std::size_t first, std::size_t end, const Nulls& null) const {
    Offset wrong = 0;
    if (null.none())
      for (std::size_t i = first; i < end; i++) wrong |= (offsets_[i + 1] - offsets_[i]) ^ 8;
    else
      for (std::size_t i = first; i < end; i++) wrong |= (offsets_[i + 1] - offsets_[i]) ^ (null(i) ? 0 : 8);
    return wrong == 0;
  }

 private:
  const Offset* offsets_;
  const char* bytes_;
};

// The lists of an array: the range of each in the buffers of their elements.
class Lists {
 public:
  // Nothing if the array has no lists.
  static std::optional<Lists> of(std::string_view format, const ArrowArray& array) {
    Lists made;
    if (format == "+l")
      made.narrow_ = elements<std::int32_t>(array);
    else if (format == "+L")
      made.wide_ = elements<std::int64_t>(array);
    else if (format.starts_with("+w:"))
      for (const char digit : format.substr(3)) made.each_ = made.each_ * 10 + (digit - '0');
    else
      return std::nullopt;
    made.begin_ = array.children[0]->offset;
    return made;
  }

  std::size_t begin(std::size_t index) const {
    const auto number = static_cast<std::int64_t>(index);
    const std::int64_t own = narrow_ != nullptr ? narrow_[index] : wide_ != nullptr ? wide_[index] : number * each_;
    return static_cast<std::size_t>(begin_ + own);
  }
  std::size_t end(std::size_t index) const { return begin(index + 1); }

 private:
  Lists() = default;
  const std::int32_t* narrow_ = nullptr;
  const std::int64_t* wide_ = nullptr;
  std::int64_t each_ = 0;
  std::int64_t begin_ = 0;
};

}  // namespace sennit::offload
