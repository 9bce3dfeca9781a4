// SPDX-License-Identifier: Apache-2.0
// The samples of a batch, picked from columns in memory: all tables' ids in one array, and lengths by table.
#pragma once

#include <cstdint>
#include <numeric>
#include <span>

namespace sennit::offload {

// The ids of one table for many samples. One of `narrow` and `wide` is there.
struct IdsInMemory {
  const std::int32_t* narrow = nullptr;
  const std::int64_t* wide = nullptr;
  const std::int64_t* offsets = nullptr;  // no offsets: one id per sample

  // Returns the number of ids of these samples.
  std::size_t lengths(std::span<const std::int64_t> samples, std::int32_t* to) const {
    if (offsets == nullptr) {
      for (std::size_t i = 0; i < samples.size(); i++) to[i] = 1;
      return samples.size();
    }
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < samples.size(); i++) {
      const std::int64_t length = offsets[samples[i] + 1] - offsets[samples[i]];
      to[i] = static_cast<std::int32_t>(length);
      sum += length;
    }
    return static_cast<std::size_t>(sum);
  }

  // Returns the place behind the last id.
  std::int64_t* copy(std::span<const std::int64_t> samples, std::int64_t* to) const {
    return narrow != nullptr ? copy(narrow, samples, to) : copy(wide, samples, to);
  }

 private:
  template <typename Id>
  std::int64_t* copy(const Id* ids, std::span<const std::int64_t> samples, std::int64_t* to) const {
    const std::size_t count = samples.size();
    // In order of time, the samples of a batch are neighbours, and so are their ids. Copying those is vectorised.
    if (are_neighbours(samples)) {
      const std::int64_t first = samples.front(), end = samples.back() + 1;
      const std::int64_t begin = offsets != nullptr ? offsets[first] : first;
      const std::int64_t ids_count = (offsets != nullptr ? offsets[end] : end) - begin;
      for (std::int64_t i = 0; i < ids_count; i++) to[i] = ids[begin + i];
      return to + ids_count;
    }
    if (offsets == nullptr) {
      for (std::size_t i = 0; i < count; i++) to[i] = ids[samples[i]];
      return to + count;
    }
    for (const std::int64_t sample : samples)
      for (std::int64_t i = offsets[sample]; i < offsets[sample + 1]; i++) *to++ = ids[i];
    return to;
  }

  static bool are_neighbours(std::span<const std::int64_t> samples) {
    std::int64_t gaps = 0;
    for (std::size_t i = 1; i < samples.size(); i++) gaps |= samples[i] - samples[i - 1] - 1;
    return gaps == 0 && !samples.empty();
  }
};

}  // namespace sennit::offload
