// SPDX-License-Identifier: Apache-2.0
// Runs of equal keys: the distinct keys, and the members of each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sort.hpp"

namespace sennit::kernels {

// The result of `runs_of`. Each array has room for all members, `starts` for one more.
struct Runs {
  std::int64_t* keys;
  std::int64_t* order;
  std::int64_t* starts;
  std::int64_t* places;
};

// Members with negative keys are left out and get the place -1. Returns the number of distinct keys.
std::size_t runs_of(const std::int64_t* keys, std::size_t members, std::uint32_t key_count, const Runs& runs,
                    std::vector<Entry>& scratch);

}  // namespace sennit::kernels
