// SPDX-License-Identifier: Apache-2.0
#include "executor/operation.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "executor/engine.hpp"
#include "executor/plan_coding.hpp"
#include "messages/signature.hpp"
#include "reduce/large_copy.hpp"
#include "trace/tracepoints.hpp"

namespace sennit {
namespace {

// Local copies are made in pieces, so that the network is looked at in between.
constexpr uint64_t COPY_PIECE_BYTES = 262'144;
constexpr uint64_t SMALL_COPIES_BYTES = 65'536;
// Bytes that are copied into a buffer of at least this size are not used again soon.
constexpr uint64_t STREAM_FROM_BYTES = 2'097'152;
// A thread is asked to help with at least this much. A fold reads so much from the second-level cache in 1.3 us, and
// from memory in 7 us (measured on an AMD EPYC).
constexpr uint64_t SHARED_PART_BYTES = 262'144;
// Parts of a fold begin at multiples of this many elements, at least a cache line: no two threads write to one.
constexpr uint64_t FOLD_STEP_ELEMENTS = 64;
// Half of the smallest first-level cache: the result, and one of the places where it goes.
constexpr uint64_t SENT_BACK_BYTES = 8'192;

uint64_t length_before(const std::byte* place) {
  uint64_t length;
  std::memcpy(&length, place - LENGTH_BYTES, sizeof length);
  return length;
}

}  // namespace

std::shared_ptr<const RunSizes> Operation::check(Plan& plan, const OperationMemory& memory,
                                                 const sennit_post_options& options) {
  if (plan.on_device != (memory.device != nullptr)) {
    throw PlanError(plan.on_device ? "the plan is for device memory, but host buffers were given"
                                   : "the plan is for host memory, but a device was given");
  }
  const std::span<const sennit_buffer> buffers = memory.buffers;
  if (!plan.on_device && buffers.size() != plan.buffer_count) {
    throw PlanError("the plan has " + std::to_string(plan.buffer_count) + " buffers, " +
                    std::to_string(buffers.size()) + " given");
  }
  std::shared_ptr<const RunSizes> sizes = plan.sizes_of({options.counts, options.count_count});
  const std::vector<uint64_t>& extents = sizes->buffer_extents;
  for (uint32_t i = 0; i < buffers.size(); ++i) {
    if (extents[i] == 0 || (buffers[i].data != nullptr && buffers[i].size_bytes >= extents[i])) continue;
    throw PlanError("buffer " + std::to_string(i) + " has " + std::to_string(buffers[i].size_bytes) +
                    " bytes, the plan needs " + std::to_string(extents[i]));
  }
  // The kernels convert the factor to 64 bits, which is undefined beyond these limits.
  if (plan.scales_integers && !(std::abs(options.scalar) < 0x1p63))
    throw PlanError("the factor " + std::to_string(options.scalar) + " of premul sum does not fit 64-bit integers");
  return sizes;
}

Operation::Operation(OperationHost& host, Plan& plan, const OperationMemory& memory, const sennit_post_options& options,
                     uint64_t sequence, std::shared_ptr<const RunSizes> sizes)
    : host_(&host),
      plan_(plan),
      sizes_(std::move(sizes)),
      buffers_(plan.buffer_count + 1),
      waits_(plan.waits),
      operands_(size_t{plan.operand_max} * host.team().threads()),
      steps_left_(static_cast<uint32_t>(plan.steps.size())),
      sequence_(sequence),
      key_base_((options.flags & SENNIT_POST_P2P) != 0 ? P2P_KEY | options.tag : sequence << KEY_SLOT_BITS),
      scalar_(options.scalar),
      seed_(options.seed),
      signature_(plan.signature_of(*sizes_, options.seed)),
      background_((options.flags & SENNIT_POST_ASYNC) != 0) {
  if (memory.device != nullptr) {
    device_ = *memory.device;
  } else {
    for (uint32_t i = 0; i < plan.buffer_count; ++i) buffers_[i] = static_cast<std::byte*>(memory.buffers[i].data);
    if (const uint64_t scratch_bytes = sizes_->buffer_extents.back(); scratch_bytes != 0) {
      scratch_ = ScratchPool::shared().take(scratch_bytes);
      buffers_[plan.buffer_count] = scratch_.get();
    }
    has_memory_ = true;
  }
  if (plan.has_loans) loans_.resize(plan.steps.size());
  // References come last: if the constructor throws, no destructor gives them back.
  plan_.references.fetch_add(1, std::memory_order_relaxed);
  host_->retain();
  if (OperationLog::shared().is_on()) times_.note_post();
}

Operation::~Operation() {
  if (times_.end_ns != 0) {
    OperationRecord record;
    record.status = status();
    record.sequence = sequence();
    record.sent_bytes = sizes_->sent_bytes;
    record.received_bytes = sizes_->received_bytes;
    record.set(times_, plan_.name);
    OperationLog::shared().add(host_, record);
  }
  if (plan_.references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete &plan_;
}

void Operation::release() {
  if (references_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  OperationHost* host = host_;
  delete this;
  host->release();
}

Engine& Operation::engine() const { return static_cast<Engine&>(*host_); }

MessageHeader Operation::header(const Step& step) const {
  const uint64_t slot = (key_base_ & P2P_KEY) != 0 ? 0 : step.slot;
  const bool receives = step.kind == StepKind::receive;
  const bool is_sized = (step.flags & STEP_SIZED) != 0;
  const auto place = [&] { return receives ? destination(step) : source(plan_.operands[step.operand_first]); };
  return {key_base_ | slot, signature_, is_sized ? length_before(place()) : size_bytes(step)};
}

std::byte* Operation::destination(const Step& step) const {
  return buffers_[step.destination_buffer] + sizes_->bytes(step.destination_offset);
}

const std::byte* Operation::source(const Operand& operand) const {
  return (operand.kind == 0 ? buffers_[operand.index] : loans_[operand.index].data) + sizes_->bytes(operand.offset);
}

void Operation::take_scratch() {
  if (plan_.scratch_bytes != 0) {
    auto* scratch = static_cast<std::byte*>(device_.scratch(device_.context, plan_.scratch_bytes));
    if (scratch == nullptr) throw DeviceError(describe() + ": no host memory for copies of device memory");
    buffers_[plan_.buffer_count] = scratch;
  }
  has_memory_ = true;
}

void Operation::number(uint64_t sequence) {
  sequence_.store(sequence, std::memory_order_relaxed);
  key_base_ = sequence << KEY_SLOT_BITS;
}

void Operation::start() {
  tell_news();
  if (plan_.has_aggregator) {
    // In the plan's order, before any of it is sent: the aggregator's blocks have the same numbers on all ranks.
    for (const Step& step : plan_.steps) {
      const bool is_asked = step.kind == StepKind::send || step.kind == StepKind::receive;
      if (is_asked && step.peer == plan_.world && !(plan_.skips_empty() && size_bytes(step) == 0))
        host_->foresee(header(step), step.kind == StepKind::send);
    }
  }
  for (uint32_t step = 0; step < waits_.size(); ++step) {
    if (waits_[step] == 0) ready(step);
  }
}

void Operation::ready(uint32_t step) {
  if (plan_.on_device && plan_.order[step] != 0) {
    ready_in_order(plan_.order[step] - 1u);
    return;
  }
  switch (plan_.steps[step].kind) {
    case StepKind::send:
    case StepKind::receive:
      ready_to_dispatch_.push_back(step);
      break;
    case StepKind::reduce:
      ready_folds_.push_back(step);
      break;
    case StepKind::branch:
      take_branch(step);
      break;
    case StepKind::encode:
    case StepKind::decode:
    case StepKind::copy:
      if (plan_.is_device_copy(plan_.steps[step])) {
        ready_to_dispatch_.push_back(step);
      } else {
        ready_copies_.push_back(step);
      }
      break;
  }
}

void Operation::take_branch(uint32_t at) {
  const Step& step = begin(at);
  uint32_t number;
  std::memcpy(&number, source(plan_.operands[step.operand_first]), sizeof number);
  if (number != 0) return done(at);
  trace::step_end(plan_.rank, this, at, static_cast<uint32_t>(step.kind), step.peer, sizeof number);
  steps_left_ -= 1 + plan_.branch_skips;
}

// Steps of one list start in its order. Their scratch becomes free in any order, so without the lists a rank could send
// a message that its receiver takes late, and hold back one that the receiver takes first.
void Operation::ready_in_order(uint32_t list) {
  const std::vector<uint32_t>& steps = plan_.ordered[list];
  uint32_t& next = next_ordered_[list];
  while (next < steps.size() && waits_[steps[next]] == 0) ready_to_dispatch_.push_back(steps[next++]);
}

const Step& Operation::begin(uint32_t at) const {
  const Step& step = plan_.steps[at];
  trace::step_begin(plan_.rank, this, at, static_cast<uint32_t>(step.kind), step.peer, size_bytes(step));
  return step;
}

void Operation::done(uint32_t at) {
  const Step& step = plan_.steps[at];
  trace::step_end(plan_.rank, this, at, static_cast<uint32_t>(step.kind), step.peer, size_bytes(step));
  pass(step);
}

// For a step that is done, or that is empty and never began.
void Operation::pass(const Step& step) {
  tell_news();
  --steps_left_;
  for (uint32_t e = 0; e < step.edge_count; ++e) {
    const uint32_t next = plan_.edges[step.edge_first + e];
    if (--waits_[next] == 0) ready(next);
  }
}

bool Operation::run_ready(bool copies) {
  bool ran = false;
  uint64_t copied_bytes = 0;
  for (;;) {
    if (!ready_to_dispatch_.empty()) {
      // In list order (docs/reference/plans.md rule 4). done() may append during the loop.
      for (size_t i = 0; i < ready_to_dispatch_.size(); ++i) dispatch(ready_to_dispatch_[i]);
      ready_to_dispatch_.clear();
    } else if (!ready_folds_.empty()) {
      const uint32_t step = ready_folds_.back();
      ready_folds_.pop_back();
      run_reduce(step);
    } else if (copies && has_copies()) {
      const uint32_t step = ready_copies_[next_copy_];
      copied_bytes += size_bytes(plan_.steps[step]);
      const bool is_copy = plan_.steps[step].kind == StepKind::copy;
      if (is_copy ? run_copy_piece(step) : run_code_piece(step)) ++next_copy_;
      // One piece a round, or some small copies, because the network comes first.
      copies = copied_bytes < SMALL_COPIES_BYTES;
    } else {
      return ran;
    }
    ran = true;
  }
}

void Operation::dispatch(uint32_t at) {
  if (plan_.skips_empty() && size_bytes(plan_.steps[at]) == 0) return pass(plan_.steps[at]);
  if (plan_.steps[at].kind == StepKind::send && !host_->may_send(*this)) {
    held_send_ = at;
    return;
  }
  const Step& step = begin(at);
  Mailbox& mailbox = host_->mailbox();
  if ((step.flags & STEP_SIZED) != 0 && header(step).size_bytes > size_bytes(step)) {
    mailbox.refuse(step.peer, "says that its codes have " + std::to_string(header(step).size_bytes) +
                                  " bytes; allowed: 0.." + std::to_string(size_bytes(step)));
    return;
  }
  const bool comes_back = (step.flags & STEP_ROUND_TRIP) != 0;
  if (step.kind == StepKind::copy) {
    dispatch_device_copy(at);
  } else if (step.kind == StepKind::send) {
    is_sent_ = true;
    // A step that waits for the send could be what the receiver's fold waits for.
    const Lane::Use use = comes_back ? Lane::Use::round_trip : step.edge_count == 0 ? Lane::Use::lend : Lane::Use::copy;
    mailbox.send(*this, at, step.peer, header(step), source(plan_.operands[step.operand_first]), use);
  } else {
    mailbox.receive(*this, at, step.peer, header(step), is_loan(step) ? nullptr : destination(step), comes_back);
  }
}

void Operation::dispatch_device_copy(uint32_t at) {
  const Step& step = plan_.steps[at];
  const Operand& operand = plan_.operands[step.operand_first];
  const auto place = [this](uint32_t buffer, uint64_t offset) -> sennit_place {
    return {buffer < plan_.buffer_count ? nullptr : buffers_[buffer] + offset, buffer, offset};
  };
  const sennit_place from = place(operand.index, operand.offset);
  const sennit_place to = place(step.destination_buffer, step.destination_offset);
  ++copies_running_;
  auto* handle = reinterpret_cast<sennit_op*>(this);
  if (device_.copy(device_.context, handle, at, &from, &to, step.size_bytes) != 0)
    throw DeviceError(describe() + ": a copy between host and device cannot be started");
}

// True when the whole of it has been copied.
bool Operation::run_copy_piece(uint32_t at) {
  const Step& step = copied_bytes_ == 0 ? begin(at) : plan_.steps[at];
  const Operand& operand = plan_.operands[step.operand_first];
  std::byte* to = destination(step);
  const std::byte* from = source(operand);
  const uint64_t left_bytes = to != from ? size_bytes(step) - copied_bytes_ : 0;
  ThreadTeam::Turn team = host_->team().take(left_bytes, SHARED_PART_BYTES);
  const uint64_t piece_bytes = std::min(left_bytes, team.threads() * COPY_PIECE_BYTES);
  if (piece_bytes != 0) {
    const bool streams = sizes_->buffer_extents[step.destination_buffer] >= STREAM_FROM_BYTES;
    team.share(piece_bytes, 4'096, [&](uint32_t, uint64_t first, uint64_t end) {
      if (streams) {
        large_copy(CopySource::memory, to + copied_bytes_ + first, from + copied_bytes_ + first, end - first);
      } else {
        std::memcpy(to + copied_bytes_ + first, from + copied_bytes_ + first, end - first);
      }
    });
  }
  copied_bytes_ += piece_bytes;
  if (piece_bytes != left_bytes) return false;
  copied_bytes_ = 0;
  if (operand.kind == 0 || host_->mailbox().release(loans_[operand.index].id)) done(at);
  return true;
}

// Codes or decodes a piece, and returns as run_copy_piece does. Pieces begin at the beginning of a block.
bool Operation::run_code_piece(uint32_t at) {
  const Step& step = copied_bytes_ == 0 ? begin(at) : plan_.steps[at];
  if (is_lossless(step)) return run_lossless_piece(at);
  const Operand& operand = plan_.operands[step.operand_first];
  const CodecSpec codec = codec_of(step, seed_);
  const auto dtype = static_cast<sennit_dtype>(step.dtype);
  const uint64_t item_bytes = element_size_bytes(dtype), count = size_bytes(step) / item_bytes;
  const uint64_t unit = codec_step(codec);
  std::byte* const to = destination(step);
  const std::byte* const from = source(operand);
  ThreadTeam::Turn team = host_->team().take(count - copied_bytes_, SHARED_PART_BYTES / item_bytes);
  const uint64_t units = (std::max(team.threads() * COPY_PIECE_BYTES / item_bytes, unit) + unit - 1) / unit;
  const uint64_t end = std::min(copied_bytes_ + units * unit, count);
  // Codes of neighbouring parts share no byte, because parts begin where blocks do.
  const uint64_t start = std::exchange(copied_bytes_, end);
  if (start != end)
    team.share(end - start, unit, [&](uint32_t, uint64_t first, uint64_t last) {
      if (step.kind == StepKind::encode) {
        const Operand& number = plan_.operands[step.operand_first + 1];
        const uint64_t index = number.kind == 3 ? sizes_->bytes(number.offset) / item_bytes : number.offset;
        encode_part(codec, dtype, from, count, index, to, start + first, start + last);
      } else {
        decode_part(codec, from, count, dtype, to, start + first, start + last);
      }
    });
  if (end != count) return false;
  copied_bytes_ = 0;
  if (operand.kind == 0 || host_->mailbox().release(std::exchange(loans_[operand.index].id, 0))) done(at);
  return true;
}

bool Operation::run_lossless_piece(uint32_t at) {
  const Step& step = plan_.steps[at];
  const auto dtype = static_cast<sennit_dtype>(step.dtype);
  const uint64_t item_bytes = element_size_bytes(dtype), count = size_bytes(step) / item_bytes;
  const uint64_t start = copied_bytes_, piece = std::min(COPY_PIECE_BYTES / item_bytes, count - start);
  const std::byte* const from = source(plan_.operands[step.operand_first]);
  std::byte* const to = destination(step);
  if (start == 0) coded_bytes_ = 0;
  if (step.kind == StepKind::encode) {
    coded_bytes_ += encode_lossless_part(dtype, from + start * item_bytes, piece, to + coded_bytes_);
    std::memcpy(to - LENGTH_BYTES, &coded_bytes_, LENGTH_BYTES);
  } else {
    // Read anew for each piece, and checked, because a peer may write where it was granted memory.
    const uint64_t length = length_before(from);
    std::optional<uint64_t> used;
    if (coded_bytes_ <= length && length <= coded_bytes(step, size_bytes(step)))
      used = decode_lossless_part(dtype, {from + coded_bytes_, length - coded_bytes_}, piece, to + start * item_bytes);
    if (!used || (start + piece == count && coded_bytes_ + *used != length)) {
      host_->mailbox().refuse(step.peer, "sent " + std::to_string(length) + " bytes that are no lossless codes of " +
                                             std::to_string(count) + " elements");
      copied_bytes_ = 0;
      return true;
    }
    coded_bytes_ += *used;
  }
  copied_bytes_ += piece;
  if (copied_bytes_ != count) return false;
  copied_bytes_ = 0;
  done(at);
  return true;
}

void Operation::run_reduce(uint32_t at) {
  const Step& step = begin(at);
  if (size_bytes(step) == 0) {  // its messages were no loans
    done(at);
    return;
  }
  const auto dtype = static_cast<sennit_dtype>(step.dtype);
  const bool gives_partial = (step.flags & STEP_PARTIAL) != 0;
  const uint64_t plain_bytes = element_size_bytes(dtype), partial_bytes = element_size_bytes(accumulator(dtype));
  const uint64_t result_bytes = gives_partial ? partial_bytes : plain_bytes;
  const uint64_t count = size_bytes(step) / result_bytes;
  // Each element's tree stands alone, so parts of the vector give the bits of the whole. The vector stays whole if the
  // result of one part would lie where another part still reads: in place, elements must be of one size.
  bool is_apart = true;
  const bool comes_back = (step.flags & STEP_ROUND_TRIP) != 0;
  if (comes_back && !open_loans(step)) return;
  const auto fold_part = [&](uint32_t part, uint64_t first, uint64_t end) {
    const std::span operands(operands_.data() + size_t{part} * plan_.operand_max, step.operand_count);
    for (uint32_t o = 0; o < step.operand_count; ++o) {
      const Operand& operand = plan_.operands[step.operand_first + o];
      const bool is_partial = operand.is_partial != 0;
      operands[o] = {source(operand) + first * (is_partial ? partial_bytes : plain_bytes), operand.combinations,
                     is_partial};
    }
    plan_.kernels[at](
        {destination(step) + first * result_bytes, operands, end - first, plan_.leaves, scalar_, gives_partial});
  };
  std::byte* const result = destination(step);
  // Results that go back are copied while they are in the first-level cache.
  const uint64_t turn = comes_back ? SENT_BACK_BYTES / result_bytes : count;
  const auto fold = [&](uint32_t part, uint64_t first, uint64_t end) {
    for (uint64_t begin = first; begin < end; begin += turn) {
      const uint64_t next = std::min(begin + turn, end);
      fold_part(part, begin, next);
      for (uint32_t o = 0; comes_back && o < step.operand_count; ++o) {
        const Operand& operand = plan_.operands[step.operand_first + o];
        if (operand.kind == 1)
          std::memcpy(const_cast<std::byte*>(source(operand)) + begin * result_bytes, result + begin * result_bytes,
                      (next - begin) * result_bytes);
      }
    }
  };
  for (uint32_t o = 0; o < step.operand_count; ++o) {
    const Operand& operand = plan_.operands[step.operand_first + o];
    const std::byte* const from = source(operand);
    const uint64_t bytes = operand.is_partial != 0 ? partial_bytes : plain_bytes;
    is_apart &= (from == result && bytes == result_bytes) || from + count * bytes <= result ||
                result + count * result_bytes <= from;
  }
  const uint64_t bytes_an_element = (step.operand_count + 1) * result_bytes;
  const uint64_t part_min = is_apart ? SHARED_PART_BYTES / bytes_an_element : count;
  host_->team().take(count, part_min).share(count, FOLD_STEP_ELEMENTS, fold);
  bool is_whole = true;  // else no step may use the result, and the group fails
  for (uint32_t o = 0; o < step.operand_count; ++o) {
    const Operand& operand = plan_.operands[step.operand_first + o];
    if (operand.kind == 0) continue;
    const uint64_t loan = std::exchange(loans_[operand.index].id, 0);
    if (comes_back) {
      host_->mailbox().send_back(loan);
    } else {
      is_whole &= host_->mailbox().release(loan);
    }
  }
  if (is_whole) done(at);
}

// Before a reduction overwrites its loans. False: the group fails.
bool Operation::open_loans(const Step& step) {
  Mailbox& mailbox = host_->mailbox();
  for (uint32_t o = 0; o < step.operand_count; ++o) {
    const Operand& operand = plan_.operands[step.operand_first + o];
    if (operand.kind == 0 || mailbox.open(loans_[operand.index].id)) continue;
    // A peer that takes its memory back waits for whoever writes there.
    for (uint32_t opened = 0; opened < o; ++opened) {
      const Operand& earlier = plan_.operands[step.operand_first + opened];
      if (earlier.kind == 1) mailbox.close(loans_[earlier.index].id);
    }
    return false;
  }
  return true;
}

void Operation::dispatch_held_send() { dispatch(std::exchange(held_send_, NO_STEP)); }

void Operation::on_message_sent(uint32_t step) { done(step); }

void Operation::on_copy_done(uint32_t step) {
  --copies_running_;
  done(step);
}

void Operation::on_message_received(uint32_t step, uint32_t peer, const std::byte* data, uint64_t loan) {
  source_ = peer;
  if (is_loan(plan_.steps[step])) loans_[step] = {data, loan};
  done(step);
}

void Operation::settle(sennit_status status, std::string reason) noexcept {
  error_ = std::move(reason);
  if (times_.posted_ns != 0) times_.end_ns = clock_ns();
  status_.store(status, std::memory_order_release);
}

Operation::Callback Operation::take_device_callback() {
  return {std::exchange(device_.ended, nullptr), device_.context};
}

Operation::Callback Operation::take_callback() { return std::exchange(callback_, {}); }

std::string Operation::describe() const {
  std::string text = plan_.name.empty() ? describe_signature(signature_) : plan_.name;
  if (is_collective() && has_number()) text += " (operation " + std::to_string(sequence()) + " of the group)";
  return text;
}

}  // namespace sennit
