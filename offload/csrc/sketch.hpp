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
  int sample_shift;  // one of 2^shift successive rows is counted
};

// Runs the program over the sampled rows in this batch's slot, and counts the ids of its columns `sparse` in
// `counts`, [tables, depth, width]. Returns the number of rows in the slot. Throws std::invalid_argument if the columns
// are not the program's, or if `counts` has another size.
std::size_t count_ids(const Receiver& receiver, std::uint32_t batch, const Program& program,
                      const std::vector<std::size_t>& sparse, const SketchShape& shape,
                      std::span<std::uint64_t> counts);

}  // namespace sennit::offload
