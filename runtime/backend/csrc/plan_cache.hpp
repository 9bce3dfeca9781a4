// SPDX-License-Identifier: Apache-2.0
// A cache of compiled plans by shape, so that a repeated call costs one hash and no interpreter.
//
// Python compiles a plan at the first call of its shape. The cache keeps at most `max_bytes` of loaded plans and drops
// the least recently used ones.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>

#include "sennit/core.h"

namespace sennit::runtime {

// docs/reference/plans.md, "Signature".
enum class Collective : uint8_t {
  ALLREDUCE = SENNIT_ALLREDUCE,
  REDUCE = SENNIT_REDUCE,
  BROADCAST = SENNIT_BROADCAST,
  ALLGATHER = SENNIT_ALLGATHER,
  GATHER = SENNIT_GATHER,
  SCATTER = SENNIT_SCATTER,
  REDUCE_SCATTER = SENNIT_REDUCE_SCATTER,
  ALLTOALL = SENNIT_ALLTOALL,
  P2P = SENNIT_P2P,
  BARRIER = SENNIT_BARRIER,
};

// Everything that a plan depends on, except the group's rank and size, which are fixed. Buffers are posted in the order
// that transport/algorithms documents: inputs, then outputs, and one buffer if it is both.
struct PlanShape {
  Collective collective = Collective::BARRIER;
  uint8_t type_code = 0;   // sennit_dtype, or 0x80 + torch's ScalarType for types without arithmetic
  uint8_t reduce = 0;      // sennit_reduce
  bool separate = false;   // every rank's part is its own buffer
  bool in_place = false;   // ALLGATHER: the output already contains this rank's part
  bool is_send = false;    // P2P only
  bool on_device = false;  // the buffers are in accelerator memory
  // 0: none. ALLGATHER, or ALLTOALL of equal parts: the algorithm is not direct, for 2^size_class bytes in all or less.
  // REDUCE_SCATTER: the plan takes the counts of 2^(size_class - 1) pieces of each share. ALLREDUCE, REDUCE, BROADCAST:
  // the plan takes the elements of a vector, whose size has the grade size_class - 1 (transport/choice/selection.py).
  uint8_t size_class = 0;
  uint32_t item_bytes = 1;
  uint32_t root = 0;  // root or peer; SENNIT_ANY_PEER: receive from any rank
  // Elements: one number, one per rank, or (ALLTOALL) sent, then received. With a size_class, ALLTOALL: one number;
  // REDUCE_SCATTER: one for each piece.
  std::span<const uint64_t> counts;

  // Whether the plan takes the counts when it is posted. Such a plan serves all counts.
  bool posts_counts() const {
    switch (collective) {
      case Collective::ALLGATHER:
      case Collective::GATHER:
      case Collective::SCATTER:
      case Collective::ALLTOALL:
      case Collective::P2P:
        return !on_device;
      case Collective::REDUCE_SCATTER:
      case Collective::ALLREDUCE:
      case Collective::REDUCE:
      case Collective::BROADCAST:
        return size_class != 0;
      default:
        return false;
    }
  }
  // The counts that the plan is compiled for.
  std::span<const uint64_t> compiled_counts() const { return posts_counts() ? std::span<const uint64_t>() : counts; }
};

// On the stack for the plans of a few ranks.
using PlanKey = c10::SmallVector<uint64_t, 8>;
using PlanPointer = std::shared_ptr<sennit_plan>;
using CompilePlan = std::function<std::string(const PlanShape&)>;

class PlanCache {
 public:
  PlanCache(CompilePlan compile, size_t max_bytes);
  // Throws what the compiler throws, or std::runtime_error if the core refuses the plan's bytes.
  PlanPointer get(const PlanShape& shape);

 private:
  struct Entry {
    PlanKey key;
    PlanPointer plan;
    size_t size_bytes;
  };
  struct Hash {
    size_t operator()(const PlanKey& key) const;
  };

  const CompilePlan compile_;
  const size_t max_bytes_;
  std::mutex mutex_;
  std::list<Entry> entries_;  // most recently used first
  std::unordered_map<PlanKey, std::list<Entry>::iterator, Hash> by_key_;
  size_t held_bytes_ = 0;
};

}  // namespace sennit::runtime
