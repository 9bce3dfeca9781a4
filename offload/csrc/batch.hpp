// SPDX-License-Identifier: Apache-2.0
// A batch in the combined format (offload/batches.py), computed from the rows that a receiver has taken.
#pragma once

#include <cstdint>
#include <vector>

#include "program.hpp"
#include "receiver.hpp"

namespace sennit::offload {

struct Batch {
  std::size_t rows = 0;
  Buffer<float> labels;          // [rows]
  Buffer<float> dense;           // [rows, dense columns]
  Buffer<std::int32_t> lengths;  // [tables, rows]
  struct Values {
    std::size_t count;
    Buffer<std::int64_t> ids;
  };
  std::vector<Values> values;  // of each table
};

// `dense` and `sparse` are column numbers of the program, whose sources are the receiver's wanted fields. Throws
// std::invalid_argument if they are not.
Batch make_batch(const Receiver& receiver, std::uint32_t number, const Program& program,
                 const std::vector<std::size_t>& dense, const std::vector<std::size_t>& sparse);

}  // namespace sennit::offload
