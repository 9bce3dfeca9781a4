// SPDX-License-Identifier: Apache-2.0
// A compiled plan, decoded from its binary form (docs/reference/plans.md) and checked once, so that running it needs no
// checks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "executor/vector_cut.hpp"
#include "reduce/fold.hpp"

namespace sennit {

enum class StepKind : uint8_t { send = 0, receive = 1, copy = 2, reduce = 3, encode = 4, decode = 5, branch = 6 };

inline constexpr uint8_t STEP_LOAN = 1;     // of a receive
inline constexpr uint8_t STEP_PARTIAL = 2;  // of a reduction: its result is a partial sum
// For a send, a loan and the reduction that reads it: the result goes back into what was sent.
inline constexpr uint8_t STEP_ROUND_TRIP = 4;
inline constexpr uint8_t STEP_STOCHASTIC = 8;  // of an encoding: it rounds at random, keyed by the post's seed
// For a send or receive: `size_bytes` is the most, and the LENGTH_BYTES before its place hold the size itself.
inline constexpr uint8_t STEP_SIZED = 16;

struct Step {  // as in the file
  StepKind kind;
  uint8_t dtype;
  uint8_t reduce;  // of a reduction; the codec's number of an encoding or decoding
  uint8_t flags;
  // Of a message; of a lossless decoding, whoever coded it. A loaded plan names its aggregator by the number `world`.
  uint32_t peer;
  uint32_t slot;  // of a message; the block of a codec
  uint32_t operand_first;
  uint32_t operand_count;
  uint32_t edge_first;
  uint32_t edge_count;
  uint32_t destination_buffer;
  uint64_t destination_offset;
  uint64_t size_bytes;  // of an encoding or decoding: the elements', not the codes'
};
static_assert(sizeof(Step) == 48);

struct Operand {  // as in the file
  // 0 buffer, 1 view of a loan, 2 a number: the offset (of an encoding: the first logical index), 3 a counted number:
  // the elements in the range of counts
  uint8_t kind = 0;
  uint8_t is_partial = 0;    // of a reduction: a partial sum
  uint8_t combinations = 0;  // of a reduction: that follow after it was pushed
  uint8_t reserved = 0;
  uint32_t index = 0;
  uint64_t offset = 0;
};
static_assert(sizeof(Operand) == 16);

struct PlanError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A size or offset of a step that is a range of the post's counts: the bytes of counts [first, end).
struct CountRange {
  static constexpr uint64_t BIT = uint64_t{1} << 63;
  static bool is(uint64_t number) { return (number & BIT) != 0; }
  explicit CountRange(uint64_t number)
      : first(static_cast<uint32_t>(number)), end(static_cast<uint32_t>((number & ~BIT) >> 32)) {}
  CountRange(uint32_t first_count, uint32_t end_count) : first(first_count), end(end_count) {}
  uint32_t size() const { return end - first; }
  std::string describe() const { return "counts[" + std::to_string(first) + ":" + std::to_string(end) + "]"; }

  uint32_t first, end;
};

// What a plan's sizes are in one run: known when it is loaded, or, if it takes counts, when it is posted.
struct RunSizes {
  // A size or offset in bytes.
  uint64_t bytes(uint64_t number) const { return CountRange::is(number) ? bytes(CountRange(number)) : number; }
  uint64_t bytes(const CountRange& range) const {
    if (count_starts.empty()) return range.size() * part_bytes;
    return count_starts[range.end] - count_starts[range.first];
  }

  uint64_t elements = 0;                 // of the vector, if the plan cuts one
  std::vector<uint64_t> count_starts;    // per count, and for the end of the last: bytes of those before
  uint64_t part_bytes = 0;               // of each count, if all are equal: then there are no count_starts
  std::vector<uint64_t> buffer_extents;  // per buffer, scratch last: bytes from its start that the run may touch
  uint64_t sent_bytes = 0;               // by this rank, to others
  uint64_t received_bytes = 0;           // from others
};

struct Plan {
  // Whether `step` is a copy that only the owner of the device can make.
  bool is_device_copy(const Step& step) const {
    if (!on_device || step.kind != StepKind::copy) return false;
    const Operand& from = operands[step.operand_first];
    return step.destination_buffer < buffer_count || (from.kind == 0 && from.index < buffer_count);
  }

  // How many counts a post gives.
  size_t posted_counts() const { return equal_counts || cuts_vector ? 1 : count_count; }
  // The signature of a run's messages. If the plan cuts a vector, it has the elements of the post.
  uint64_t signature_of(const RunSizes& run, uint64_t seed) const;
  // Whether a run sends no empty messages. Ranks of a vector without elements must still hear of each other.
  bool skips_empty() const { return cuts_vector && cut.elements_max != 0; }

  // Throws PlanError with the rule that the plan breaks.
  static std::unique_ptr<Plan> decode(const void* bytes, size_t size_bytes);

  // The sizes of a run with these counts. Those of the last run are kept, because most calls repeat one.
  // Throws PlanError where the counts do not fit the plan, or make one of its ranges overflow.
  std::shared_ptr<const RunSizes> sizes_of(std::span<const uint64_t> counts);

  uint32_t world = 0;
  uint32_t rank = 0;
  uint32_t leaves = 0;  // of a reduction's tree: AVG divides by them
  uint64_t signature = 0;
  uint64_t scratch_bytes = 0;  // or a range of counts
  uint32_t buffer_count = 0;
  uint32_t count_count = 0;   // counts that a post gives
  bool equal_counts = false;  // a post gives one, which stands for all
  bool cuts_vector = false;   // a post gives one, the elements of a vector; `cut` makes all counts of it
  VectorCut cut;
  uint32_t unit_bytes = 0;  // of one counted element
  bool on_device = false;   // the caller's buffers are device memory, which only copies touch
  std::string name;
  std::vector<Step> steps;
  std::vector<Operand> operands;
  std::vector<uint32_t> edges;
  // Derived from the above.
  std::vector<uint32_t> waits;      // per step: steps that must be done before it
  std::vector<FoldKernel> kernels;  // per step: REDUCE only
  uint32_t operand_max = 0;         // the largest number of operands of a step
  // On a device: lists of steps that start in the list's order, and for each step 1 + its list, or 0.
  std::array<std::vector<uint32_t>, 3> ordered;  // copies to the host, sends that wait only for these, receives
  std::vector<uint8_t> order;
  uint32_t p2p_send_peer = SENNIT_ANY_PEER;  // for a plan that sends one message outside the group's order
  bool has_loans = false;
  bool has_aggregator = false;
  uint32_t branch_skips = 0;  // steps behind the branch, which it may leave out
  bool has_round_trips = false;
  bool scales_integers = false;  // for PREMUL_SUM of an integer type

  std::mutex last_mutex;
  std::vector<uint64_t> last_counts;
  std::shared_ptr<const RunSizes> last_sizes;

  std::atomic<uint32_t> references{1};
};

}  // namespace sennit
