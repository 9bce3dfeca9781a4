// SPDX-License-Identifier: Apache-2.0
#include "operators.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "id_kernels.hpp"

// The BPF programs use the same header.
#include "../../ebpf/include/operators.h"

namespace sennit::offload {
namespace {

constexpr std::uint32_t NAN_BITS = 0x7fc00000;

template <typename Function>
Column map_values(const Column& ids, Function function) {
  auto out = buffer<std::int64_t>(ids.count);
  const std::int64_t* in = ids.values;
  std::int64_t* to = out->data();
  for (std::size_t i = 0, end = ids.count; i < end; i++) to[i] = function(in[i]);
  return same_lengths(ids, std::move(out));
}

template <typename Function>
Column map_dense(const Column& x, Function function) {
  auto out = buffer<float>(x.rows);
  const float* in = x.dense;
  float* to = out->data();
  for (std::size_t i = 0, end = x.rows; i < end; i++) to[i] = function(in[i]);
  return dense_column(x.rows, std::move(out));
}

}  // namespace

Column clamp(const Column& x, float low, float high) {
  return map_dense(x, [=](float value) { return value < low ? low : value > high ? high : value; });
}

Column look_up(const Column& x, int bits, const std::vector<std::uint32_t>& table) {
  const int shift = 32 - bits;
  return map_dense(x, [&](float value) {
    const auto raw = std::bit_cast<std::uint32_t>(value);
    const std::uint64_t rounded = (raw + (std::uint64_t{1} << (shift - 1))) >> shift;
    // Not std::isnan: the result must have exactly these bits.
    const bool is_nan = (raw & 0x7fffffffu) > 0x7f800000u;
    return std::bit_cast<float>(is_nan ? NAN_BITS : table[rounded]);
  });
}

Column bucketize(const Column& x, const std::vector<float>& borders) {
  auto lengths = buffer<std::int32_t>(x.rows);
  std::fill_n(lengths->data(), x.rows, 1);
  auto out = buffer<std::int64_t>(x.rows);
  for (std::size_t row = 0; row < x.rows; row++) {
    const float value = x.dense[row];
    // NaN is below no border, so it comes after all of them.
    const auto is_before = [=](float border) { return !(value <= border); };
    (*out)[row] = std::partition_point(borders.begin(), borders.end(), is_before) - borders.begin();
  }
  return ids_column(x.rows, std::move(lengths), x.rows, std::move(out));
}

Column sigrid_hash(const Column& ids, std::int64_t salt, std::int64_t max_value) {
  auto out = buffer<std::int64_t>(ids.count);
  id_kernels().sigrid_hash(ids.values, out->data(), ids.count, salt, max_value);
  return same_lengths(ids, std::move(out));
}

Column positive_modulus(const Column& ids, std::int64_t divisor) {
  auto out = buffer<std::int64_t>(ids.count);
  id_kernels().positive_modulus(ids.values, out->data(), ids.count, divisor);
  return same_lengths(ids, std::move(out));
}

Column clamp_list(const Column& ids, std::int64_t low, std::int64_t high) {
  return map_values(ids, [=](std::int64_t id) { return std::clamp(id, low, high); });
}

Column map_id(const Column& ids, const IdDictionary& table) {
  return map_values(ids, [&](std::int64_t id) {
    const std::uint64_t home = (static_cast<std::uint64_t>(id) * table.multiplier) >> table.shift;
    for (int probe = 0; probe < table.probes; probe++)
      if (table.keys[home + probe] == id) return table.values[home + probe];
    return table.absent;
  });
}

Column enumerate(const Column& ids) {
  auto out = buffer<std::int64_t>(ids.count);
  std::int64_t* to = out->data();
  for (std::size_t row = 0; row < ids.rows; row++)
    for (std::int64_t position = 0; position < ids.lengths[row]; position++) *to++ = position;
  return same_lengths(ids, std::move(out));
}

Column first_x(const Column& ids, std::int32_t count) {
  auto lengths = buffer<std::int32_t>(ids.rows);
  auto out = buffer<std::int64_t>(ids.count);
  const std::int64_t* from = ids.values;
  std::int64_t* to = out->data();
  for (std::size_t row = 0; row < ids.rows; row++) {
    (*lengths)[row] = std::min(ids.lengths[row], count);
    to = std::copy_n(from, (*lengths)[row], to);
    from += ids.lengths[row];
  }
  const auto kept = static_cast<std::size_t>(to - out->data());
  return ids_column(ids.rows, std::move(lengths), kept, std::move(out));
}

Column ngram(const Column& ids, std::int32_t count) {
  auto lengths = buffer<std::int32_t>(ids.rows);
  // Never more elements than ids.
  auto out = buffer<std::int64_t>(ids.count);
  const std::int64_t* from = ids.values;
  std::int64_t* to = out->data();
  for (std::size_t row = 0; row < ids.rows; row++) {
    (*lengths)[row] = std::max(ids.lengths[row] - (count - 1), 0);
    for (std::int32_t first = 0; first < (*lengths)[row]; first++) {
      auto combined = static_cast<std::uint64_t>(from[first + count - 1]);
      for (std::int32_t step = count - 2; step >= 0; step--)
        combined = hash_combine(static_cast<std::uint64_t>(from[first + step]), combined);
      *to++ = static_cast<std::int64_t>(combined);
    }
    from += ids.lengths[row];
  }
  const auto made = static_cast<std::size_t>(to - out->data());
  return ids_column(ids.rows, std::move(lengths), made, std::move(out));
}

Column cross(const Column& left, const Column& right) {
  auto lengths = buffer<std::int32_t>(left.rows);
  std::size_t count = 0;
  for (std::size_t row = 0; row < left.rows; row++) {
    (*lengths)[row] = left.lengths[row] * right.lengths[row];
    count += static_cast<std::size_t>((*lengths)[row]);
  }
  auto out = buffer<std::int64_t>(count);
  const std::int64_t *a = left.values, *b = right.values;
  std::int64_t* to = out->data();
  for (std::size_t row = 0; row < left.rows; row++) {
    for (std::int32_t i = 0; i < left.lengths[row]; i++)
      for (std::int32_t j = 0; j < right.lengths[row]; j++)
        *to++ =
            static_cast<std::int64_t>(hash_combine(static_cast<std::uint64_t>(a[i]), static_cast<std::uint64_t>(b[j])));
    a += left.lengths[row];
    b += right.lengths[row];
  }
  return ids_column(left.rows, std::move(lengths), count, std::move(out));
}

}  // namespace sennit::offload
