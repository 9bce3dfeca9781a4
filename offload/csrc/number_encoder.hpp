// SPDX-License-Identifier: Apache-2.0
// A column of numbers of Arrow as a dense feature: clamped, looked up in a table of a function, and scaled, in one
// pass.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "arrow_array.hpp"

namespace sennit::offload {

struct NumberEncoder {
  std::optional<std::pair<float, float>> clamp;
  // The bits of the function's results by the upper `table_bits` bits of a number, or no table.
  const std::uint32_t* table = nullptr;
  int table_bits = 0;
  double mean, deviation;

  // Writes every `stride`-th number. Null is 0, the scaled mean. False for a value that is not a finite number or has
  // no finite result, and for a column of other things than numbers.
  bool encode(std::string_view format, const ArrowArray& column, float* out, std::size_t stride) const {
    bool fine = true;
    const auto count = static_cast<std::size_t>(column.length), first = static_cast<std::size_t>(column.offset);
    if (format == "n") {
      for (std::size_t i = 0; i < count; i++) out[i * stride] = 0.0f;
      return true;
    }
    const Nulls null(column);
    const bool are_numbers = with_numbers(format, [&]<typename Number>(const Number*) {
      const Number* values = elements<Number>(column) + first;
      for (std::size_t i = 0; i < count; i++) {
        if (null(first + i)) {
          out[i * stride] = 0.0f;
          continue;
        }
        const auto made = apply(static_cast<float>(static_cast<double>(values[i])));
        fine &= std::isfinite(static_cast<double>(values[i])) && std::isfinite(made);
        out[i * stride] = scaled(made);
      }
    });
    return fine && are_numbers;
  }

 private:
  float apply(float value) const {
    if (clamp) value = value < clamp->first ? clamp->first : value > clamp->second ? clamp->second : value;
    if (table == nullptr) return value;
    const int shift = 32 - table_bits;
    const std::uint64_t raw = std::bit_cast<std::uint32_t>(value);
    // The largest NaN would round to an index behind the table.
    if (std::isnan(value)) return value;
    return std::bit_cast<float>(table[(raw + (std::uint64_t{1} << (shift - 1))) >> shift]);
  }

  float scaled(float value) const {
    const double found = (static_cast<double>(value) - mean) / deviation;
    return std::isnan(found) ? 0.0f : static_cast<float>(found);
  }
};

}  // namespace sennit::offload
