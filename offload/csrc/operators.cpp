// SPDX-License-Identifier: Apache-2.0
#include "operators.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

// What the BPF programs compute with, too.
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

// The remainder with the divisor's sign, by a multiplication with the inverse (Barrett). The quotient of a number below
// 2^64 comes out right or one too low.
class FloorMod {
 public:
  explicit FloorMod(std::int64_t divisor)
      : divisor_(static_cast<std::uint64_t>(divisor)),
        inverse_(divisor == 1 ? std::numeric_limits<std::uint64_t>::max()
                              : static_cast<std::uint64_t>((static_cast<unsigned __int128>(1) << 64) / divisor_)) {}

  std::int64_t operator()(std::uint64_t value) const {
    // A negative number is the complement of one that is not, and its remainder counts from the other end.
    const auto sign = static_cast<std::uint64_t>(static_cast<std::int64_t>(value) >> 63);
    const std::uint64_t magnitude = value ^ sign;
    const auto quotient = static_cast<std::uint64_t>((static_cast<unsigned __int128>(magnitude) * inverse_) >> 64);
    std::uint64_t remainder = magnitude - quotient * divisor_;
    // Without branches: of hashes every second one is negative.
    remainder -= divisor_ & (std::uint64_t{0} - static_cast<std::uint64_t>(remainder >= divisor_));
    return static_cast<std::int64_t>((sign & (divisor_ - 1 - remainder)) | (~sign & remainder));
  }

 private:
  std::uint64_t divisor_, inverse_;
};

}  // namespace

Column clamp(const Column& x, float low, float high) {
  return map_dense(x, [=](float value) { return value < low ? low : value > high ? high : value; });
}

Column look_up(const Column& x, int bits, const std::vector<std::uint32_t>& table) {
  const int shift = 32 - bits;
  return map_dense(x, [&](float value) {
    const auto raw = std::bit_cast<std::uint32_t>(value);
    const std::uint64_t rounded = (raw + (std::uint64_t{1} << (shift - 1))) >> shift;
    // Not std::isnan: what comes out must be exactly these bits.
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
    // NaN is not below any border, but behind all of them.
    const auto is_before = [=](float border) { return !(value <= border); };
    (*out)[row] = std::partition_point(borders.begin(), borders.end(), is_before) - borders.begin();
  }
  return ids_column(x.rows, std::move(lengths), x.rows, std::move(out));
}

Column sigrid_hash(const Column& ids, std::int64_t salt, std::int64_t max_value) {
  const FloorMod modulus(max_value);
  const auto first = static_cast<std::uint64_t>(salt);
  return map_values(
      ids, [=](std::int64_t id) { return modulus(hash_combine(first, twang_mix64(static_cast<std::uint64_t>(id)))); });
}

Column positive_modulus(const Column& ids, std::int64_t divisor) {
  const FloorMod modulus(divisor);
  return map_values(ids, [=](std::int64_t id) { return modulus(static_cast<std::uint64_t>(id)); });
}

Column clamp_list(const Column& ids, std::int64_t low, std::int64_t high) {
  return map_values(ids, [=](std::int64_t id) { return std::clamp(id, low, high); });
}

Column map_id(const Column& ids, const IdTable& table) {
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
  // Never more than ids.
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
