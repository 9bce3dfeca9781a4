// SPDX-License-Identifier: Apache-2.0
// What is done with ids before a lookup: dealing them to row shards, and finding the distinct ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "job.hpp"

namespace sennit::kernels {

// Shard r has the ids from borders[r] up to borders[r + 1]. Writes the lengths of bags in each shard [shards, bags],
// and ids less the border of their shard, as wide as `values`: by shard, then by bag, in the order of the bag. Returns
// whether lengths count the values and all ids are in a shard; if not, nothing written has a meaning.
bool split_rows(const Integers& lengths, std::size_t bags, const Integers& values, std::size_t count,
                std::span<const std::int64_t> borders, std::int32_t* lengths_of_shards, void* values_of_shards);

// Writes the distinct values, rising, and where among them each value is. Both have room for all values. Returns how
// many there are, or SIZE_MAX if a value is not in [0, 2^32 - 1).
std::size_t distinct(const Integers& values, std::size_t count, std::int64_t* ids, std::int64_t* places);

}  // namespace sennit::kernels
