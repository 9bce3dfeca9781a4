// SPDX-License-Identifier: Apache-2.0
// The samples of a batch, picked from columns in memory: all tables' ids in one array, and lengths by table.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace sennit::offload {

// The samples of a batch. In order of time they are neighbours, and so are their ids. Copying those is vectorised.
struct Picked {
  std::span<const std::int64_t> samples;
  bool are_neighbours;

  explicit Picked(std::span<const std::int64_t> which) : samples(which), are_neighbours(!which.empty()) {
    std::int64_t gaps = 0;
    for (std::size_t i = 1; i < which.size(); i++) gaps |= which[i] - which[i - 1] - 1;
    are_neighbours &= gaps == 0;
  }

  // Copies rows of `width` numbers.
  void copy(const float* rows, std::size_t width, float* to) const {
    if (are_neighbours) {
      std::copy_n(rows + static_cast<std::size_t>(samples.front()) * width, samples.size() * width, to);
      return;
    }
    for (std::size_t i = 0; i < samples.size(); i++)
      std::copy_n(rows + static_cast<std::size_t>(samples[i]) * width, width, to + i * width);
  }
};

// The ids of one table for many samples. One of `narrow` and `wide` is there.
struct IdsInMemory {
  const std::int32_t* narrow = nullptr;
  const std::int64_t* wide = nullptr;
  const std::int64_t* offsets = nullptr;  // no offsets: one id per sample

  // Returns the number of ids of these samples.
  std::size_t lengths(const Picked& picked, std::int32_t* to) const {
    const std::span<const std::int64_t> samples = picked.samples;
    if (offsets == nullptr) {
      std::fill_n(to, samples.size(), 1);
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
  std::int64_t* copy(const Picked& picked, std::int64_t* to) const {
    return narrow != nullptr ? copy(narrow, picked, to) : copy(wide, picked, to);
  }

 private:
  template <typename Id>
  std::int64_t* copy(const Id* ids, const Picked& picked, std::int64_t* to) const {
    const std::span<const std::int64_t> samples = picked.samples;
    const std::size_t count = samples.size();
    if (picked.are_neighbours) {
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
};

}  // namespace sennit::offload
