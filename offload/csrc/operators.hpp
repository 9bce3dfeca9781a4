// SPDX-License-Identifier: Apache-2.0
// The operators of a feature plan, one column at a time. docs/reference/feature-plans.md defines them,
// offload/reference.py is the reference.
#pragma once

#include <cstdint>
#include <vector>

#include "column.hpp"

namespace sennit::offload {

Column clamp(const Column& x, float low, float high);
// `table` has 2^bits entries: the bits of the results.
Column look_up(const Column& x, int bits, const std::vector<std::uint32_t>& table);
Column bucketize(const Column& x, const std::vector<float>& borders);

Column sigrid_hash(const Column& ids, std::int64_t salt, std::int64_t max_value);
Column positive_modulus(const Column& ids, std::int64_t divisor);
Column clamp_list(const Column& ids, std::int64_t low, std::int64_t high);
Column enumerate(const Column& ids);
Column first_x(const Column& ids, std::int32_t count);
Column ngram(const Column& ids, std::int32_t count);
Column cross(const Column& left, const Column& right);

// A dictionary laid out as in offload/tables.py: open addressing, at most `probes` places from an id's home.
struct IdDictionary {
  std::uint64_t multiplier;
  int shift;
  int probes;
  std::vector<std::int64_t> keys;
  std::vector<std::int64_t> values;
  std::int64_t absent;
};
Column map_id(const Column& ids, const IdDictionary& table);

}  // namespace sennit::offload
