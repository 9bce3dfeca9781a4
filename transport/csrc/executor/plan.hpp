// SPDX-License-Identifier: Apache-2.0
// A compiled plan, decoded from its binary form (docs/reference/plans.md) and checked once, so that running it needs no
// checks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "reduce/fold.hpp"

namespace sennit {

enum class StepKind : uint8_t { send = 0, receive = 1, copy = 2, reduce = 3 };

inline constexpr uint8_t STEP_LOAN = 1;

struct Step {  // as in the file
  StepKind kind;
  uint8_t dtype;
  uint8_t reduce;
  uint8_t flags;
  uint32_t peer;
  uint32_t slot;
  uint32_t operand_first;
  uint32_t operand_count;
  uint32_t edge_first;
  uint32_t edge_count;
  uint32_t destination_buffer;
  uint64_t destination_offset;
  uint64_t size_bytes;
};
static_assert(sizeof(Step) == 48);

struct Operand {  // as in the file
  uint32_t kind;  // 0 buffer, 1 view of a loan
  uint32_t index;
  uint64_t offset;
};
static_assert(sizeof(Operand) == 16);

struct PlanError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Plan {
  // Throws PlanError naming what is wrong.
  static std::unique_ptr<Plan> decode(const void* bytes, size_t size_bytes);

  uint32_t world = 0;
  uint32_t rank = 0;
  uint64_t signature = 0;
  uint64_t scratch_bytes = 0;
  uint32_t buffer_count = 0;
  std::string name;
  std::vector<Step> steps;
  std::vector<Operand> operands;
  std::vector<uint32_t> edges;
  // Derived.
  std::vector<uint32_t> waits;           // per step: steps that must be done before it
  std::vector<FoldKernel> kernels;       // per step: REDUCE only
  std::vector<uint64_t> buffer_extents;  // per buffer: bytes the plan touches
  uint64_t sent_bytes = 0;               // by this rank, to others
  uint64_t received_bytes = 0;           // from others
  uint32_t operand_max = 0;              // most operands of a step
  bool has_loans = false;
  bool scales_integers = false;  // PREMUL_SUM of an integer type

  std::atomic<uint32_t> references{1};
};

}  // namespace sennit
