// SPDX-License-Identifier: Apache-2.0
#include "executor/plan.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <tuple>

#include "executor/plan_coding.hpp"
#include "messages/mailbox.hpp"
#include "messages/signature.hpp"

namespace sennit {
namespace {

constexpr uint32_t PLAN_MAGIC = 0x31504E53;
constexpr uint16_t PLAN_VERSION = 2;
constexpr uint64_t SLOT_LIMIT = NO_SLOT;
constexpr uint32_t PLAN_ON_DEVICE = 1;
constexpr uint32_t PLAN_EQUAL_COUNTS = 2;
constexpr uint32_t PLAN_CUTS_VECTOR = 4;
// The most that the counts of a post may sum up to, so that no sum of two of their ranges wraps.
constexpr uint64_t COUNTED_MAX_BYTES = (uint64_t{1} << 63) - 1;

struct FileHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t buffer_count;
  uint32_t world;
  uint32_t rank;
  uint64_t signature;
  uint32_t step_count;
  uint32_t operand_count;
  uint32_t edge_count;
  uint32_t name_bytes;
  uint64_t scratch_bytes;
  uint32_t flags;
  uint32_t count_count;
  uint32_t leaves;
  uint32_t unit_bytes;
};
static_assert(sizeof(FileHeader) == 64);

struct FileCut {  // before the counts of a vector
  uint64_t elements_max;
  uint64_t piece_bytes;
  uint32_t share_count;
  uint32_t piece_count;
};
static_assert(sizeof(FileCut) == 24);

[[noreturn]] void refuse(const std::string& what) { throw PlanError("malformed plan: " + what); }

template <class Record>
const std::byte* take(std::vector<Record>& out, const std::byte* at, size_t count) {
  out.resize(count);
  if (count != 0) std::memcpy(out.data(), at, count * sizeof(Record));
  return at + count * sizeof(Record);
}

// The bytes of one element of a reduction's result.
uint32_t result_bytes(const Step& step) {
  const auto dtype = static_cast<sennit_dtype>(step.dtype);
  return element_size_bytes((step.flags & STEP_PARTIAL) != 0 ? accumulator(dtype) : dtype);
}

// What `step` reads of `operand` if its size is `size_bytes`, which may be a range of counts: then that range.
// UINT64_MAX if no memory is that large.
uint64_t operand_bytes(const Step& step, const Operand& operand, uint64_t size_bytes) {
  if (CountRange::is(size_bytes)) return size_bytes;
  if (step.kind == StepKind::decode) return coded_bytes(step, size_bytes);
  if (step.kind != StepKind::reduce) return size_bytes;
  const auto dtype = static_cast<sennit_dtype>(step.dtype);
  const uint64_t count = size_bytes / result_bytes(step);
  const uint64_t element_bytes = element_size_bytes(operand.is_partial != 0 ? accumulator(dtype) : dtype);
  return count > UINT64_MAX / 2 / element_bytes ? UINT64_MAX : count * element_bytes;
}

uint64_t written_bytes(const Step& step, uint64_t size_bytes) {
  return step.kind == StepKind::encode ? coded_bytes(step, size_bytes) : size_bytes;
}

class Checker {
 public:
  explicit Checker(Plan& plan) : plan_(plan) {}

  void run() {
    if (plan_.leaves == 0) refuse("the tree has no leaves");
    if (plan_.rank >= plan_.world)
      refuse("rank " + std::to_string(plan_.rank) + " of " + std::to_string(plan_.world) + "; ranks begin with 0");
    plan_.waits.assign(plan_.steps.size(), 0);
    plan_.kernels.assign(plan_.steps.size(), nullptr);
    if ((plan_.count_count != 0) != (plan_.unit_bytes != 0))
      refuse("it takes " + std::to_string(plan_.count_count) + " counts of elements of " +
             std::to_string(plan_.unit_bytes) + " bytes");
    if (plan_.equal_counts && plan_.count_count == 0) refuse("its counts are equal, but it takes none");
    if (plan_.count_count != 0 && plan_.on_device) refuse("it takes counts; a plan for device memory must not");
    if (plan_.cuts_vector) check_cut();
    check_counted(plan_.scratch_bytes, "the scratch");
    for (uint32_t at = 0; at < plan_.steps.size(); ++at) check_step(at);
    if (plan_.count_count == 0) measure();
    check_loans();
    check_messages();
    check_acyclic();
    count_skipped();
    if (plan_.on_device) find_order();
  }

 private:
  void check_cut() const {
    if (plan_.count_count == 0 || plan_.equal_counts) refuse("it cuts a vector into counts that it does not name");
    if (const std::string why = plan_.cut.refusal(plan_.unit_bytes); !why.empty()) refuse(why);
  }

  void measure() {
    try {
      plan_.sizes_of({});
    } catch (const PlanError& error) {
      refuse(error.what());
    }
  }

  void check_place(uint32_t buffer, uint64_t offset, const Step& step, const std::string& where) const {
    if (buffer > plan_.buffer_count)
      refuse(where + " names buffer " + std::to_string(buffer) + "; allowed: 0.." + std::to_string(plan_.buffer_count));
    check_counted(offset, where);
    if (!CountRange::is(offset)) return;
    if (!CountRange::is(step.size_bytes)) refuse(where + " moves a fixed size at a place that depends on counts");
    if (uint64_t{CountRange(offset).end} + CountRange(step.size_bytes).size() > plan_.count_count)
      refuse(where + " reaches beyond the last of the plan's counts");
  }

  void check_counted(uint64_t number, const std::string& where) const {
    if (!CountRange::is(number)) return;
    const CountRange range(number);
    if (range.first > range.end || range.end > plan_.count_count)
      refuse(where + " names " + range.describe() + " of " + std::to_string(plan_.count_count) + " counts");
  }

  void check_step(uint32_t at) {
    const Step& step = plan_.steps[at];
    const std::string where = "step " + std::to_string(at);
    if (uint64_t{step.edge_first} + step.edge_count > plan_.edges.size()) refuse(where + " has edges out of range");
    for (uint32_t e = 0; e < step.edge_count; ++e) {
      const uint32_t to = plan_.edges[step.edge_first + e];
      if (to >= plan_.steps.size()) refuse(where + " has an edge to step " + std::to_string(to));
      ++plan_.waits[to];
    }
    if (uint64_t{step.operand_first} + step.operand_count > plan_.operands.size())
      refuse(where + " has operands out of range");
    plan_.operand_max = std::max(plan_.operand_max, step.operand_count);
    check_counted(step.size_bytes, where);
    const bool network = step.kind == StepKind::send || step.kind == StepKind::receive;
    if (network && step.slot >= SLOT_LIMIT) refuse(where + " has slot " + std::to_string(step.slot));
    if (network && step.peer == SENNIT_AGGREGATOR) {
      check_aggregated(step, where);
    } else if (network && step.peer != SENNIT_ANY_PEER && (step.peer >= plan_.world || step.peer == plan_.rank)) {
      refuse(where + " has peer " + std::to_string(step.peer));
    }
    if (step.peer == SENNIT_ANY_PEER && step.kind == StepKind::send) refuse(where + " sends to any peer");
    if (step.peer == SENNIT_ANY_PEER && step.kind == StepKind::receive && collective_of(plan_.signature) != SENNIT_P2P)
      refuse(where + " receives from any peer, but the plan is no send/recv");
    const bool loan = step.kind == StepKind::receive && (step.flags & STEP_LOAN) != 0;
    if (loan && !CountRange::is(step.size_bytes) && (step.size_bytes == 0 || step.size_bytes > MAX_LOAN_BYTES))
      refuse(where + " is a loan of " + std::to_string(step.size_bytes) + " bytes; allowed: 1.." +
             std::to_string(MAX_LOAN_BYTES));
    plan_.has_loans |= loan;
    if ((step.flags & STEP_ROUND_TRIP) != 0) check_round_trip(step, where);
    if ((step.flags & STEP_SIZED) != 0) {
      if (const std::string why = sized_refusal(plan_, step); !why.empty()) refuse(where + why);
    }
    switch (step.kind) {
      case StepKind::receive:
        if (step.operand_count != 0) refuse(where + " receives, but has operands");
        break;
      case StepKind::send:
        if (collective_of(plan_.signature) == SENNIT_P2P) plan_.p2p_send_peer = step.peer;
        [[fallthrough]];
      case StepKind::copy:
        if (step.operand_count != 1) refuse(where + " must have one operand");
        break;
      case StepKind::encode:
      case StepKind::decode:
        if (const std::string why = coding_refusal(plan_, step); !why.empty()) refuse(where + why);
        break;
      case StepKind::reduce:
        check_reduce(at);
        break;
      case StepKind::branch:
        check_branch(at);
        break;
      default:
        refuse(where + " has the unknown kind " + std::to_string(static_cast<int>(step.kind)));
    }
    if (step.kind != StepKind::send && step.kind != StepKind::branch && !loan)
      check_place(step.destination_buffer, step.destination_offset, step, where);
    if (plan_.on_device) check_device(step, loan, where);
    for (uint32_t o = 0; o < step.operand_count; ++o) check_operand(step, plan_.operands[step.operand_first + o], at);
  }

  void check_round_trip(const Step& step, const std::string& where) {
    plan_.has_round_trips = true;
    const bool is_counted = CountRange::is(step.size_bytes);
    if (plan_.on_device || collective_of(plan_.signature) == SENNIT_P2P || (is_counted && !plan_.skips_empty()))
      refuse(where + " makes a round trip; a plan on device, a counted size that may be empty or a send/recv must not");
    const bool is_loan = step.kind == StepKind::receive && (step.flags & STEP_LOAN) != 0;
    if (step.kind == StepKind::send) {
      if (!is_counted && (step.size_bytes == 0 || step.size_bytes > MAX_LOAN_BYTES))
        refuse(where + " makes a round trip of " + std::to_string(step.size_bytes) + " bytes; allowed: 1.." +
               std::to_string(MAX_LOAN_BYTES));
    } else if (!is_loan && (step.kind != StepKind::reduce || (step.flags & STEP_PARTIAL) != 0)) {
      refuse(where + " makes a round trip; only a send, a loan and a reduction to final results may");
    }
  }

  void check_aggregated(const Step& step, const std::string& where) {
    plan_.has_aggregator = true;
    if (step.flags != 0 || plan_.on_device || collective_of(plan_.signature) == SENNIT_P2P)
      refuse(where + " asks an aggregator; a loan, a round trip, a plan on device or a send/recv must not");
  }

  void check_branch(uint32_t at) {
    const Step& step = plan_.steps[at];
    const std::string where = "step " + std::to_string(at);
    if (branch_ != UINT32_MAX) refuse(where + " is a second branch");
    branch_ = at;
    if (step.operand_count != 1 || plan_.operands[step.operand_first].kind != 0 ||
        plan_.operands[step.operand_first].index != plan_.buffer_count || step.size_bytes != sizeof(uint32_t))
      refuse(where + " is a branch; it must read 4 bytes of scratch");
  }

  // What a branch leaves out waits for it, so none of it has begun.
  void count_skipped() {
    if (branch_ == UINT32_MAX) return;
    std::vector<bool> is_found(plan_.steps.size());
    std::vector<uint32_t> found{branch_};
    while (!found.empty()) {
      const Step& step = plan_.steps[found.back()];
      found.pop_back();
      for (uint32_t e = 0; e < step.edge_count; ++e) {
        const uint32_t next = plan_.edges[step.edge_first + e];
        if (is_found[next]) continue;
        is_found[next] = true;
        found.push_back(next);
        ++plan_.branch_skips;
      }
    }
  }

  void check_reduce(uint32_t at) {
    const Step& step = plan_.steps[at];
    const std::string where = "step " + std::to_string(at);
    if (step.operand_count == 0) refuse(where + " must have operands");
    const auto dtype = static_cast<sennit_dtype>(step.dtype);
    plan_.kernels[at] = find_fold(dtype, static_cast<sennit_reduce>(step.reduce));
    if (plan_.kernels[at] == nullptr)
      refuse(where + ": " + reduce_name(step.reduce) + " of " + dtype_name(step.dtype) + " does not exist");
    const bool is_counted = CountRange::is(step.size_bytes);
    if (!is_counted && step.size_bytes % result_bytes(step) != 0) refuse(where + " reduces part of an element");
    if (is_counted && !plan_.cuts_vector && (step.flags & STEP_PARTIAL) != 0)
      refuse(where + " makes partial sums of a counted size");
    static_assert(SENNIT_I64 < SENNIT_F16, "integers come first");
    plan_.scales_integers |= step.reduce == SENNIT_PREMUL_SUM && step.dtype < SENNIT_F16;
    uint32_t depth = 0;
    for (uint32_t o = 0; o < step.operand_count; ++o) {
      const uint32_t combinations = plan_.operands[step.operand_first + o].combinations;
      ++depth;
      if (depth > MAX_FOLD_DEPTH)
        refuse(where + " keeps " + std::to_string(depth) + " values; allowed: " + std::to_string(MAX_FOLD_DEPTH));
      if (combinations >= depth)
        refuse(where + " combines " + std::to_string(combinations + 1) + " values after operand " + std::to_string(o) +
               "; there are " + std::to_string(depth));
      depth -= combinations;
    }
    if (depth != 1) refuse(where + " leaves " + std::to_string(depth) + " values; needed: 1");
  }

  // Only the owner of a device can address its memory, and the owner copies at its own pace.
  void check_device(const Step& step, bool loan, const std::string& where) {
    const auto is_device = [this](uint32_t buffer) { return buffer < plan_.buffer_count; };
    const bool writes = step.kind != StepKind::send && !loan && is_device(step.destination_buffer);
    bool reads = false, reads_loan = false;
    for (uint32_t o = 0; o < step.operand_count; ++o) {
      const Operand& operand = plan_.operands[step.operand_first + o];
      reads |= operand.kind == 0 && is_device(operand.index);
      reads_loan |= operand.kind == 1;
    }
    if ((writes || reads) && step.size_bytes != 0 && step.kind != StepKind::copy)
      refuse(where + " touches device memory; only a copy may");
    if (writes && reads_loan) refuse(where + " copies a loan to device memory");
  }

  void check_operand(const Step& step, const Operand& operand, uint32_t at) {
    const std::string where = "step " + std::to_string(at);
    if (operand.is_partial > 1 || operand.reserved != 0) refuse(where + " has an operand of an unknown kind");
    if (step.kind != StepKind::reduce && (operand.is_partial != 0 || operand.combinations != 0))
      refuse(where + " has an operand that only a reduction may have");
    const bool is_counted = CountRange::is(step.size_bytes);
    const bool is_elsewhere =
        operand.kind == 0 && !CountRange::is(operand.offset) && operand.index != step.destination_buffer;
    if (is_counted && !plan_.cuts_vector && operand.is_partial != 0 && !is_elsewhere)
      refuse(where + " reads partial sums of a counted size where parts lie one after another");
    if (operand.kind == 3 && !CountRange::is(operand.offset)) refuse(where + " has a counted number without counts");
    if (operand.kind == 3) check_counted(operand.offset, where);
    if (operand.kind >= 2 && operand.kind <= 3 && step.kind == StepKind::encode) return;
    const uint64_t size_bytes = operand_bytes(step, operand, step.size_bytes);
    if (size_bytes == UINT64_MAX) refuse(where + " has an overflowing range");
    if (operand.kind == 0) {
      check_place(operand.index, operand.offset, step, where);
      const uint64_t low = std::max(operand.offset, step.destination_offset);
      const uint64_t high = std::min(operand.offset + size_bytes, step.destination_offset + step.size_bytes);
      const bool same = operand.offset == step.destination_offset && size_bytes == step.size_bytes;
      // Whether other counted ranges overlap is not known yet.
      const bool overlaps = is_counted ? !are_apart(operand.offset, step) : low < high;
      if (step.kind == StepKind::reduce && operand.index == step.destination_buffer && overlaps && !same)
        refuse(where + " writes over part of an operand; allowed: the whole of it, or nothing");
      return;
    }
    if (operand.kind != 1 || operand.index >= plan_.steps.size()) refuse(where + " has an operand of an unknown kind");
    const Step& loan = plan_.steps[operand.index];
    if (loan.kind != StepKind::receive || (loan.flags & STEP_LOAN) == 0)
      refuse(where + " reads a step that is no loan");
    // How many codes counted elements have, and how wide their partial sums are, is known when the plan is posted.
    const bool is_measured =
        (step.kind == StepKind::decode || plan_.cuts_vector) && is_counted && CountRange::is(loan.size_bytes);
    if (plan_.cuts_vector) check_place(step.destination_buffer, operand.offset, step, where);
    if (is_measured ? operand.offset != 0 && !(plan_.cuts_vector && CountRange::is(operand.offset))
        : is_counted || CountRange::is(loan.size_bytes)
            ? operand.offset != 0 || size_bytes != loan.size_bytes
            : operand.offset > loan.size_bytes || size_bytes > loan.size_bytes - operand.offset)
      refuse(where + " reads beyond a loan");
    if (step.kind == StepKind::send) refuse(where + " sends a loan");
    const bool comes_back = (loan.flags & STEP_ROUND_TRIP) != 0;
    if (comes_back != ((step.flags & STEP_ROUND_TRIP) != 0))
      refuse(where + " and the loan that it reads must both make the round trip, or neither");
    if (comes_back && (operand.is_partial != 0 || size_bytes != loan.size_bytes))
      refuse(where + " sends back another size than it was lent");
    if (readers_.empty()) readers_.assign(plan_.steps.size(), UINT32_MAX);
    if (readers_[operand.index] != UINT32_MAX && readers_[operand.index] != at) refuse("a loan is read by two steps");
    readers_[operand.index] = at;
  }

  // For a step with a counted size that reads in the buffer where it writes: whether it reads other counts than it
  // writes.
  static bool are_apart(uint64_t offset, const Step& step) {
    if (!CountRange::is(offset) || !CountRange::is(step.destination_offset)) return false;
    const CountRange from(offset), to(step.destination_offset);
    const uint64_t size = CountRange(step.size_bytes).size();
    return from.first == to.first && (from.end + size <= to.end || to.end + size <= from.end);
  }

  // The step that reads a loan hands it back. So each loan has a reader, which must not run before the bytes are there.
  void check_loans() {
    for (uint32_t at = 0; at < plan_.steps.size(); ++at) {
      const Step& step = plan_.steps[at];
      if (step.kind != StepKind::receive || (step.flags & STEP_LOAN) == 0) continue;
      if (readers_.empty() || readers_[at] == UINT32_MAX) refuse("nobody reads the loan of step " + std::to_string(at));
      const auto edges = plan_.edges.begin() + step.edge_first;
      if (std::find(edges, edges + step.edge_count, readers_[at]) == edges + step.edge_count)
        refuse("step " + std::to_string(readers_[at]) + " reads the loan of step " + std::to_string(at) +
               " without waiting for it");
    }
  }

  // Two messages with the same slot between the same ranks could be confused.
  void check_messages() {
    std::vector<std::tuple<StepKind, uint32_t, uint32_t>> messages;
    for (const Step& step : plan_.steps)
      if (step.kind == StepKind::send || step.kind == StepKind::receive)
        messages.emplace_back(step.kind, step.peer, step.slot);
    std::sort(messages.begin(), messages.end());
    const auto twice = std::adjacent_find(messages.begin(), messages.end());
    if (twice != messages.end())
      refuse("slot " + std::to_string(std::get<2>(*twice)) + " is used twice with peer " +
             std::to_string(std::get<1>(*twice)));
  }

  void check_acyclic() {
    std::vector<uint32_t> waits = plan_.waits;
    std::vector<uint32_t> ready;
    for (uint32_t at = 0; at < waits.size(); ++at) {
      if (waits[at] == 0) ready.push_back(at);
    }
    size_t done = 0;
    while (!ready.empty()) {
      const Step& step = plan_.steps[ready.back()];
      ready.pop_back();
      ++done;
      for (uint32_t e = 0; e < step.edge_count; ++e) {
        if (--waits[plan_.edges[step.edge_first + e]] == 0) ready.push_back(plan_.edges[step.edge_first + e]);
      }
    }
    if (done != plan_.steps.size()) refuse("its steps wait for one another in a circle");
  }

  void find_order() {
    enum List : uint8_t { loads, sends, receives };
    plan_.order.assign(plan_.steps.size(), 0);
    const auto put = [this](uint32_t at, List list) {
      plan_.ordered[list].push_back(at);
      plan_.order[at] = list + 1;
    };
    std::vector<bool> waits_for_others(plan_.steps.size());
    for (uint32_t at = 0; at < plan_.steps.size(); ++at) {
      const Step& step = plan_.steps[at];
      if (plan_.is_device_copy(step) && step.destination_buffer == plan_.buffer_count) {
        put(at, loads);
        continue;
      }
      for (uint32_t e = 0; e < step.edge_count; ++e) waits_for_others[plan_.edges[step.edge_first + e]] = true;
      if (step.kind == StepKind::receive && (step.flags & STEP_LOAN) == 0) {
        put(at, receives);
      }
    }
    for (uint32_t at = 0; at < plan_.steps.size(); ++at) {
      if (plan_.steps[at].kind == StepKind::send && !waits_for_others[at]) put(at, sends);
    }
  }

  Plan& plan_;
  uint32_t branch_ = UINT32_MAX;
  std::vector<uint32_t> readers_;  // for each step with a loan; empty before the first one
};

// Ranges of a checked plan in bytes, for given counts.
class Measure {
 public:
  explicit Measure(const Plan& plan) : plan_(plan) {}

  RunSizes run(std::span<const uint64_t> counts) {
    add_counts(counts);
    sizes_.buffer_extents.assign(plan_.buffer_count + 1, 0);
    uint64_t& scratch_extent = sizes_.buffer_extents[plan_.buffer_count];
    const uint64_t scratch_bytes = sizes_.bytes(plan_.scratch_bytes);
    for (uint32_t at = 0; at < plan_.steps.size(); ++at) add_step(at);
    if (scratch_extent > scratch_bytes) throw PlanError("a step reaches beyond the scratch");
    scratch_extent = scratch_bytes;
    return std::move(sizes_);
  }

 private:
  void add_counts(std::span<const uint64_t> counts) {
    if (counts.size() != plan_.posted_counts())
      throw PlanError("the plan takes " + std::to_string(plan_.posted_counts()) + " counts, " +
                      std::to_string(counts.size()) + " given");
    if (counts.empty()) return;
    if (plan_.cuts_vector) {
      const uint64_t most = plan_.cut.elements_max;
      if (counts[0] > most || (counts[0] == 0 && most != 0))
        throw PlanError("the vector has " + std::to_string(static_cast<int64_t>(counts[0])) + " elements; allowed: " +
                        std::to_string(std::min<uint64_t>(most, 1)) + ".." + std::to_string(most));
      sizes_.elements = counts[0];
      sizes_.count_starts = plan_.cut.starts(counts[0], plan_.unit_bytes);
      return;
    }
    if (plan_.equal_counts) {
      check_count(counts, 0, COUNTED_MAX_BYTES / plan_.unit_bytes / plan_.count_count);
      sizes_.part_bytes = counts[0] * plan_.unit_bytes;
      return;
    }
    sizes_.count_starts.reserve(counts.size() + 1);
    uint64_t start = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
      sizes_.count_starts.push_back(start);
      check_count(counts, i, (COUNTED_MAX_BYTES - start) / plan_.unit_bytes);
      start += counts[i] * plan_.unit_bytes;
    }
    sizes_.count_starts.push_back(start);
  }

  static void check_count(std::span<const uint64_t> counts, size_t i, uint64_t left) {
    // The message shows the count as signed, because a count that is too large was a negative one of the caller.
    if (counts[i] > left)
      throw PlanError("count " + std::to_string(i) + " is " + std::to_string(static_cast<int64_t>(counts[i])) +
                      "; allowed: 0.." + std::to_string(left));
  }

  void add_step(uint32_t at) {
    const Step& step = plan_.steps[at];
    const bool loan = step.kind == StepKind::receive && (step.flags & STEP_LOAN) != 0;
    const uint64_t size_bytes = sizes_.bytes(step.size_bytes);
    const bool comes_back = (step.flags & STEP_ROUND_TRIP) != 0;
    if ((loan || (comes_back && step.kind == StepKind::send)) && size_bytes > MAX_LOAN_BYTES)
      throw PlanError("step " + std::to_string(at) + " is a loan of " + std::to_string(size_bytes) +
                      " bytes; allowed: 0.." + std::to_string(MAX_LOAN_BYTES));
    if (step.kind == StepKind::send || (comes_back && loan)) sizes_.sent_bytes += size_bytes;
    if (step.kind == StepKind::receive || (comes_back && step.kind == StepKind::send))
      sizes_.received_bytes += size_bytes;
    if (step.kind == StepKind::reduce && size_bytes % result_bytes(step) != 0)
      throw PlanError("step " + std::to_string(at) + " reduces part of an element");
    if (step.kind == StepKind::encode || step.kind == StepKind::decode) {
      const Operand& operand = plan_.operands[step.operand_first];
      const uint64_t from = sizes_.bytes(operand.offset), to = sizes_.bytes(step.destination_offset);
      if (const std::string why = coded_range_refusal(step, operand, from, to, size_bytes); !why.empty())
        throw PlanError("step " + std::to_string(at) + why);
    }
    if (step.kind != StepKind::send && step.kind != StepKind::branch && !loan)
      add_place(at, step.destination_buffer, step.destination_offset, written_bytes(step, size_bytes));
    for (uint32_t o = 0; o < step.operand_count; ++o) {
      const Operand& operand = plan_.operands[step.operand_first + o];
      const uint64_t read_bytes = operand_bytes(step, operand, size_bytes);
      if (operand.kind == 0) add_place(at, operand.index, operand.offset, read_bytes);
      if (operand.kind != 1) continue;
      const uint64_t loan_bytes = sizes_.bytes(plan_.steps[operand.index].size_bytes);
      const uint64_t begin = sizes_.bytes(operand.offset);
      if (begin > loan_bytes || read_bytes > loan_bytes - begin)
        throw PlanError("step " + std::to_string(at) + " reads beyond a loan");
    }
  }

  void add_place(uint32_t at, uint32_t buffer, uint64_t offset, uint64_t size_bytes) {
    const uint64_t begin = sizes_.bytes(offset);
    if (begin + size_bytes < begin) throw PlanError("step " + std::to_string(at) + " has an overflowing range");
    if (CountRange::is(offset)) check_fit(at, CountRange(offset), size_bytes);
    const bool has_length = buffer == plan_.buffer_count && is_sized(plan_.steps[at]);
    if (has_length && begin < LENGTH_BYTES)
      throw PlanError("step " + std::to_string(at) + " has no place for a length");
    uint64_t& extent = sizes_.buffer_extents[buffer];
    if (size_bytes != 0 || has_length) extent = std::max(extent, begin + size_bytes);
  }

  // Bytes at a counted place are whole parts.
  void check_fit(uint32_t at, const CountRange& offset, uint64_t size_bytes) const {
    const CountRange size(plan_.steps[at].size_bytes);
    const CountRange place(offset.end, offset.end + size.size());
    if (sizes_.bytes(place) == size_bytes) return;
    throw PlanError("step " + std::to_string(at) + " moves " + std::to_string(size_bytes) + " bytes (" +
                    size.describe() + "), but its place has " + std::to_string(sizes_.bytes(place)) + " (" +
                    place.describe() + ")");
  }

  const Plan& plan_;
  RunSizes sizes_;
};

}  // namespace

uint64_t Plan::signature_of(const RunSizes& run, uint64_t seed) const {
  return with_seed(signature, seed) | (run.elements & 0xFFFF'FFFF);
}

std::shared_ptr<const RunSizes> Plan::sizes_of(std::span<const uint64_t> counts) {
  const std::lock_guard<std::mutex> lock(last_mutex);
  if (!last_sizes || !std::ranges::equal(counts, last_counts)) {
    last_sizes = std::make_shared<const RunSizes>(Measure(*this).run(counts));
    last_counts.assign(counts.begin(), counts.end());
  }
  return last_sizes;
}

std::unique_ptr<Plan> Plan::decode(const void* bytes, size_t size_bytes) {
  FileHeader header;
  if (size_bytes < sizeof header) refuse("shorter than its header");
  const std::byte* at = static_cast<const std::byte*>(bytes);
  std::memcpy(&header, at, sizeof header);
  at += sizeof header;
  if (header.magic != PLAN_MAGIC) refuse("not a plan");
  if (header.version != PLAN_VERSION) {
    refuse("version " + std::to_string(header.version) + ", this core reads " + std::to_string(PLAN_VERSION));
  }
  const bool cuts_vector = (header.flags & PLAN_CUTS_VECTOR) != 0;
  const uint64_t needed = sizeof header + uint64_t{header.step_count} * sizeof(Step) +
                          uint64_t{header.operand_count} * sizeof(Operand) + uint64_t{header.edge_count} * 4 +
                          (cuts_vector ? sizeof(FileCut) + uint64_t{header.count_count} * 4 : 0) + header.name_bytes;
  if (needed != size_bytes) refuse(std::to_string(size_bytes) + " bytes instead of " + std::to_string(needed));
  auto plan = std::make_unique<Plan>();
  plan->world = header.world;
  plan->rank = header.rank;
  plan->leaves = header.leaves;
  plan->signature = header.signature;
  plan->scratch_bytes = header.scratch_bytes;
  plan->buffer_count = header.buffer_count;
  if ((header.flags & ~(PLAN_ON_DEVICE | PLAN_EQUAL_COUNTS | PLAN_CUTS_VECTOR)) != 0)
    refuse("unknown flags in " + std::to_string(header.flags));
  plan->on_device = (header.flags & PLAN_ON_DEVICE) != 0;
  plan->equal_counts = (header.flags & PLAN_EQUAL_COUNTS) != 0;
  plan->count_count = header.count_count;
  plan->unit_bytes = header.unit_bytes;
  at = take(plan->steps, at, header.step_count);
  at = take(plan->operands, at, header.operand_count);
  at = take(plan->edges, at, header.edge_count);
  if (cuts_vector) {
    FileCut cut;
    std::memcpy(&cut, at, sizeof cut);
    plan->cuts_vector = true;
    plan->cut.elements_max = cut.elements_max;
    plan->cut.piece_bytes = cut.piece_bytes;
    plan->cut.share_count = cut.share_count;
    plan->cut.piece_count = cut.piece_count;
    at = take(plan->cut.counts, at + sizeof cut, header.count_count);
  }
  plan->name.assign(reinterpret_cast<const char*>(at), header.name_bytes);
  Checker(*plan).run();
  for (Step& step : plan->steps)
    if (step.peer == SENNIT_AGGREGATOR) step.peer = plan->world;
  return plan;
}

}  // namespace sennit
