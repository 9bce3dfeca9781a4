// SPDX-License-Identifier: Apache-2.0
#include "number_encoder.hpp"

#include <array>
#include <bit>
#include <type_traits>

namespace sennit::offload {
namespace {

// True for all but infinities and NaN. Comparing is vectorised, std::isfinite is not.
template <typename Number>
bool is_finite(Number value) {
  return value - value == Number{0};
}

}  // namespace

bool NumberEncoder::encode(std::string_view format, const ArrowArray& column, std::size_t first, std::size_t count,
                           float* out, std::size_t stride) const {
  if (format == "n") {
    for (std::size_t i = 0; i < count; i++) out[i * stride] = 0.0f;
    return true;
  }
  first += static_cast<std::size_t>(column.offset);
  const Nulls null(column);
  std::array<bool, ROWS_MAX> is_null{};
  if (!null.none())
    for (std::size_t i = 0; i < count; i++) is_null[i] = null(first + i);
  std::array<float, ROWS_MAX> values;
  int strange = 0;
  const bool are_numbers = with_numbers(format, [&]<typename Number>(const Number*) {
    const Number* from = elements<Number>(column) + first;
    for (std::size_t i = 0; i < count; i++) {
      // Integers are rounded twice, as NumPy and Arrow do it.
      const auto value = static_cast<double>(from[i]);
      if constexpr (std::is_floating_point_v<Number>) {
        const bool is_strange = !is_finite(value);
        strange |= static_cast<int>(is_strange && !is_null[i]);
        // `operate` takes no NaN.
        values[i] = is_strange ? 0.0f : static_cast<float>(value);
      } else {
        values[i] = static_cast<float>(value);
      }
    }
  });
  if (!are_numbers || strange != 0) return false;
  operate(values.data(), count);
  for (std::size_t i = 0; i < count; i++) strange |= static_cast<int>(!is_finite(values[i]) && !is_null[i]);
  for (std::size_t i = 0; i < count; i++) {
    const double found = (static_cast<double>(values[i]) - mean) / deviation;
    values[i] = found == found && !is_null[i] ? static_cast<float>(found) : 0.0f;
  }
  for (std::size_t i = 0; i < count; i++) out[i * stride] = values[i];
  return strange == 0;
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
