// SPDX-License-Identifier: Apache-2.0
#include "executor/plan_coding.hpp"

#include <span>

#include "messages/signature.hpp"
#include "reduce/fold.hpp"

namespace sennit {
namespace {

// The most bytes to code, so that no size wraps with any codec.
constexpr uint64_t CODED_MAX_BYTES = uint64_t{1} << 48;

}  // namespace

uint64_t coded_bytes(const Step& step, uint64_t size_bytes) {
  const auto dtype = static_cast<sennit_dtype>(step.dtype);
  return coded_bytes(codec_of(step, 0), dtype, size_bytes / element_size_bytes(dtype));
}

std::string coded_range_refusal(const Step& step, const Operand& operand, uint64_t from, uint64_t to,
                                uint64_t size_bytes) {
  if (size_bytes > CODED_MAX_BYTES)
    return " codes " + std::to_string(size_bytes) + " bytes; allowed: 0.." + std::to_string(CODED_MAX_BYTES);
  if (size_bytes % element_size_bytes(static_cast<sennit_dtype>(step.dtype)) != 0) return " codes part of an element";
  const uint64_t coded = coded_bytes(step, size_bytes);
  const bool encodes = step.kind == StepKind::encode;
  const uint64_t read = encodes ? size_bytes : coded, written = encodes ? coded : size_bytes;
  if (operand.kind == 0 && operand.index == step.destination_buffer && from < to + written && to < from + read)
    return " writes over what it reads";
  return "";
}

bool is_sized(const Step& step) {
  const bool codes = step.kind == StepKind::encode || step.kind == StepKind::decode;
  return codes ? is_lossless(step) : (step.flags & STEP_SIZED) != 0;
}

// Only the core writes to scratch, so a length that is there is what was encoded or received.
std::string sized_refusal(const Plan& plan, const Step& step) {
  const bool receives = step.kind == StepKind::receive;
  const bool is_whole = (step.flags & ~STEP_SIZED) == 0 && step.operand_count == (receives ? 0 : 1);
  if (!(receives || step.kind == StepKind::send) || !is_whole || plan.on_device ||
      collective_of(plan.signature) == SENNIT_P2P)
    return " has a length; only a plain message of a collective in host memory may";
  const Operand place = receives ? Operand{.index = step.destination_buffer} : plan.operands[step.operand_first];
  if (place.kind != 0 || place.index != plan.buffer_count) return " has a length outside of scratch";
  return "";
}

std::string coding_refusal(const Plan& plan, const Step& step) {
  const bool encodes = step.kind == StepKind::encode;
  const CodecSpec codec = codec_of(step, 0);
  if (const std::string why = codec_refusal(codec, static_cast<sennit_dtype>(step.dtype)); !why.empty())
    return " codes with " + why;
  if ((step.flags & ~(encodes ? STEP_STOCHASTIC : 0)) != 0)
    return " codes with unknown flags in " + std::to_string(step.flags);
  const uint64_t item_bytes = element_size_bytes(static_cast<sennit_dtype>(step.dtype));
  const std::span operands(plan.operands.data() + step.operand_first, step.operand_count);
  if (operands.size() != (encodes ? 2 : 1) || operands[0].kind > 1 || (encodes && operands[1].kind < 2))
    return encodes ? " encodes, and must have elements and the index of the first one as operands"
                   : " decodes, and must have one operand";
  const uint64_t elements_at = encodes ? operands[0].offset : step.destination_offset;
  if (!CountRange::is(elements_at) && elements_at % item_bytes != 0)
    return " codes elements that do not begin at a multiple of their size";
  // Peers compare signatures, so none decodes what another codec made.
  if (!is_codec_of(plan.signature, codec, encodes)) return " uses a codec that the plan's signature does not name";
  if (is_lossless(step)) {
    if (operands[0].kind != 0 || (encodes ? step.destination_buffer : operands[0].index) != plan.buffer_count)
      return " codes lossless outside of scratch, where lengths are";
    if (!encodes && step.peer >= plan.world) return " decodes what rank " + std::to_string(step.peer) + " coded";
  }
  return "";
}

}  // namespace sennit
