// SPDX-License-Identifier: Apache-2.0
// One collective after its arguments have been checked: everything needed to post it.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "arguments.hpp"
#include "packing.hpp"
#include "plan_cache.hpp"
#include "poster.hpp"
#include "torch_versions.hpp"

namespace sennit::runtime {

struct Call {
  const char* title = "";
  c10d::OpType type = c10d::OpType::UNKNOWN;
  Collective collective = Collective::BARRIER;
  PostOptions options;
  uint8_t type_code = 0;
  uint8_t reduce = 0;
  std::optional<double> factor;  // of PREMUL_SUM: this rank's numbers are multiplied by it before they are sent
  uint32_t item_bytes = 1;
  uint32_t root = 0;
  bool separate = false;
  bool in_place = false;
  bool is_send = false;
  bool equal_parts = false;  // ALLTOALL: this rank passes no splits, so all parts of all ranks are equal
  uint8_t size_class = 0;    // of PlanShape
  c10::SmallVector<uint64_t, 8> counts;
  // In the order of the algorithms. A tensor that is input and output is in `outputs` only.
  c10::SmallVector<at::Tensor, 2> inputs;
  c10::SmallVector<at::Tensor, 2> outputs;
  std::vector<Packed> packed;  // outputs that are not contiguous
  c10::Device device{c10::kCPU};
  bool on_device = false;  // tensors are in memory that only an accelerator can address

  void set_reduce(const c10d::ReduceOp& op, at::ScalarType type) {
    reduce = checked_reduce(op, type);
    factor = premul_factor(op, type);
  }

  PlanShape shape() const {
    PlanShape shape;
    shape.collective = collective;
    shape.type_code = type_code;
    shape.reduce = reduce;
    shape.separate = separate;
    shape.in_place = in_place;
    shape.is_send = is_send;
    shape.on_device = on_device;
    shape.size_class = size_class;
    shape.item_bytes = item_bytes;
    shape.root = root;
    shape.counts = {counts.data(), counts.size()};
    return shape;
  }
};

}  // namespace sennit::runtime
