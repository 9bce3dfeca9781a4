// SPDX-License-Identifier: Apache-2.0
// How often ids are used: the sketch of offload/sketch.py, cell for cell.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "program.hpp"
#include "receiver.hpp"

namespace sennit::offload {

struct SketchShape {
  std::size_t width, depth;
  int sample_shift;  // of 2^shift successive rows one is counted
};

// Of the rows that the slot of this batch holds, runs the program over those that are sampled, and counts the ids of
// its columns `sparse` in `counts`, [tables, depth, width]. Returns how many rows the slot holds. Throws
// std::invalid_argument where the columns are not the program's, or `counts` has another size.
std::size_t count_ids(const Receiver& receiver, std::uint32_t batch, const Program& program,
                      const std::vector<std::size_t>& sparse, const SketchShape& shape,
                      std::span<std::uint64_t> counts);

}  // namespace sennit::offload
