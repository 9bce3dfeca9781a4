// SPDX-License-Identifier: Apache-2.0
#include "number_encoder.hpp"

#include <array>
#include <bit>

namespace sennit::offload {
namespace {

constexpr std::uint32_t INFINITE_BITS = 0x7f800000;

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// All bits of infinities and NaN, none of other numbers. Comparing integers is vectorised, std::isfinite is not.
std::uint32_t strange(float value) { return (bits_of(value) & INFINITE_BITS) == INFINITE_BITS ? ~0u : 0u; }

// `wrong(value, rounded)`: 0 for a number that is allowed.
template <typename Wrong>
bool read_numbers(std::string_view format, const ArrowArray& column, float* out, std::size_t stride, Wrong wrong) {
  const auto first = static_cast<std::size_t>(column.offset), count = static_cast<std::size_t>(column.length);
  const Nulls null(column);
  std::uint32_t found = 0;
  if (!null.none())
    for (std::size_t i = 0; i < count; i++) found |= static_cast<std::uint32_t>(null(first + i));
  const bool are_numbers = with_numbers(format, [&]<typename Number>(const Number*) {
    const Number* from = elements<Number>(column) + first;
    for (std::size_t i = 0; i < count; i++) {
      const auto value = static_cast<double>(from[i]);
      const auto rounded = static_cast<float>(value);
      found |= wrong(value, rounded);
      out[i * stride] = rounded;
    }
  });
  return are_numbers && found == 0;
}

}  // namespace

bool read_labels(std::string_view format, const ArrowArray& column, float* out, std::size_t stride) {
  return read_numbers(format, column, out, stride, [](double value, float) {
    return static_cast<std::uint32_t>(value != 0.0) & static_cast<std::uint32_t>(value != 1.0);
  });
}

bool read_weights(std::string_view format, const ArrowArray& column, float* out) {
  return read_numbers(format, column, out, 1, [](double, float rounded) {
    return strange(rounded) | static_cast<std::uint32_t>(rounded < 0.0f);
  });
}

bool NumberEncoder::encode(std::string_view format, const ArrowArray& column, std::size_t first, std::size_t count,
                           float* out, std::size_t stride) const {
  if (format == "n") {
    for (std::size_t i = 0; i < count; i++) out[i * stride] = 0.0f;
    return true;
  }
  first += static_cast<std::size_t>(column.offset);
  std::array<float, ROWS_MAX> values;
  const bool are_numbers = with_numbers(format, [&]<typename Number>(const Number*) {
    const Number* from = elements<Number>(column) + first;
    // Integers are rounded twice, as NumPy and Arrow do it.
    for (std::size_t i = 0; i < count; i++) values[i] = static_cast<float>(static_cast<double>(from[i]));
  });
  if (!are_numbers) return false;
  const Nulls null(column);
  std::array<std::uint32_t, ROWS_MAX> kept;
  const auto clear_nulls = [&] {
    for (std::size_t i = 0; i < count; i++) values[i] = std::bit_cast<float>(bits_of(values[i]) & kept[i]);
  };
  if (!null.none()) {
    for (std::size_t i = 0; i < count; i++) kept[i] = null(first + i) ? 0u : ~0u;
    clear_nulls();
  }
  std::uint32_t wrong = 0;
  for (std::size_t i = 0; i < count; i++) wrong |= strange(values[i]);
  if (wrong != 0) return false;
  operate(values.data(), count);
  if (null.none())
    for (std::size_t i = 0; i < count; i++) wrong |= strange(values[i]);
  else
    for (std::size_t i = 0; i < count; i++) wrong |= strange(values[i]) & kept[i];
  for (std::size_t i = 0; i < count; i++) {
    const double found = (static_cast<double>(values[i]) - mean) / deviation;
    values[i] = found == found ? static_cast<float>(found) : 0.0f;
  }
  if (!null.none()) clear_nulls();
  for (std::size_t i = 0; i < count; i++) wrong |= strange(values[i]);
  for (std::size_t i = 0; i < count; i++) out[i * stride] = values[i];
  return wrong == 0;
}

void NumberEncoder::operate(float* values, std::size_t count) const {
  if (clamp) {
    const auto [low, high] = *clamp;
    for (std::size_t i = 0; i < count; i++) values[i] = values[i] < low ? low : values[i] > high ? high : values[i];
  }
  if (table == nullptr) return;
  const int shift = 32 - table_bits;
  for (std::size_t i = 0; i < count; i++) {
    const std::uint64_t raw = std::bit_cast<std::uint32_t>(values[i]);
    // No NaN comes here, whose bits could round to an index behind the table.
    values[i] = std::bit_cast<float>(table[(raw + (std::uint64_t{1} << (shift - 1))) >> shift]);
  }
}

}  // namespace sennit::offload
