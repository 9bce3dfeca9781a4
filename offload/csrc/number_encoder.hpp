// SPDX-License-Identifier: Apache-2.0
// A column of numbers of Arrow as a dense feature: clamped, looked up in a table of a function, and scaled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "arrow_array.hpp"

namespace sennit::offload {

struct NumberEncoder {
  // Rows that are encoded at once. Those of all columns of a batch then stay in the first cache.
  static constexpr std::size_t ROWS_MAX = 256;

  std::optional<std::pair<float, float>> clamp;
  // The bits of the function's results by the upper `table_bits` bits of a number, or no table.
  const std::uint32_t* table = nullptr;
  int table_bits = 0;
  double mean, deviation;

  // Encodes `count` rows from `first` on, at most ROWS_MAX, and writes every `stride`-th number. Null is 0, the scaled
  // mean. False for a value that is no finite number or has no finite result, at any step, and for a column of other
  // things.
  bool encode(std::string_view format, const ArrowArray& column, std::size_t first, std::size_t count, float* out,
              std::size_t stride) const;

 private:
  void operate(float* values, std::size_t count) const;
};

// The numbers of a column as they are, every `stride`-th of `out`. False for null, for a label that is neither 0 nor 1,
// for a weight that is negative or not finite, and for a column of other things.
bool read_labels(std::string_view format, const ArrowArray& column, float* out, std::size_t stride);
bool read_weights(std::string_view format, const ArrowArray& column, float* out);

}  // namespace sennit::offload
