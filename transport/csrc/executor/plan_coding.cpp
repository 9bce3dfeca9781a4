// SPDX-License-Identifier: Apache-2.0
#include "executor/plan_coding.hpp"

#include <span>

#include "messages/signature.hpp"
#include "reduce/fold.hpp"

namespace sennit {
namespace {

// So that no size wraps, whatever the codec.
constexpr uint64_t CODED_MAX_BYTES = uint64_t{1} << 48;

}  // namespace

uint64_t element_count(const Step& step) {
  return step.size_bytes / element_size_bytes(static_cast<sennit_dtype>(step.dtype));
}

uint64_t coded_bytes(const Step& step) {
  return coded_bytes(codec_of(step, 0), static_cast<sennit_dtype>(step.dtype), element_count(step));
}

std::string coding_refusal(const Plan& plan, const Step& step) {
  const bool encodes = step.kind == StepKind::encode;
  const CodecSpec codec = codec_of(step, 0);
  if (codec.kind == CodecKind::lossless) return " codes lossless, which has no fixed size; allowed: codecs 0 to 5";
  if (const std::string why = codec_refusal(codec, static_cast<sennit_dtype>(step.dtype)); !why.empty())
    return " codes with " + why;
  if ((step.flags & ~(encodes ? STEP_STOCHASTIC : 0)) != 0)
    return " codes with unknown flags in " + std::to_string(step.flags);
  if (CountRange::is(step.size_bytes)) return " codes a counted size";
  if (step.size_bytes > CODED_MAX_BYTES)
    return " codes " + std::to_string(step.size_bytes) + " bytes; allowed: 0.." + std::to_string(CODED_MAX_BYTES);
  const uint64_t item_bytes = element_size_bytes(static_cast<sennit_dtype>(step.dtype));
  if (step.size_bytes % item_bytes != 0) return " codes part of an element";
  const std::span operands(plan.operands.data() + step.operand_first, step.operand_count);
  if (operands.size() != (encodes ? 2 : 1) || operands[0].kind == 2 || (encodes && operands[1].kind != 2))
    return encodes ? " encodes, and must have elements and the index of the first one as operands"
                   : " decodes, and must have one operand";
  if ((encodes ? operands[0].offset : step.destination_offset) % item_bytes != 0)
    return " codes elements that do not begin at a multiple of their size";
  // Peers compare signatures, so none decodes what another codec made.
  if (!is_codec_of(plan.signature, codec, encodes)) return " uses a codec that the plan's signature does not name";
  const uint64_t from = operands[0].offset, to = step.destination_offset;
  const uint64_t coded = coded_bytes(step);
  const uint64_t read = encodes ? step.size_bytes : coded, written = encodes ? coded : step.size_bytes;
  // Bits 63 mark counts, and are refused where places are checked.
  if (operands[0].kind == 0 && operands[0].index == step.destination_buffer && from < to + written && to < from + read)
    return " writes over what it reads";
  return "";
}

}  // namespace sennit
