// SPDX-License-Identifier: Apache-2.0
// The steps of a plan that encode and decode: their codec, sizes and rules (docs/reference/plans.md, "Codecs").
#pragma once

#include <cstdint>
#include <string>

#include "codec/codec.hpp"
#include "executor/plan.hpp"

namespace sennit {

// `seed`: the post's.
inline CodecSpec codec_of(const Step& step, uint64_t seed) {
  return {static_cast<CodecKind>(step.reduce), step.slot, (step.flags & STEP_STOCHASTIC) != 0, seed};
}

// The elements of a step, and the bytes of their coded form.
uint64_t element_count(const Step& step);
uint64_t coded_bytes(const Step& step);

// The rule that a step breaks, as the end of a sentence; empty if it breaks none. Places in buffers and loans are
// checked as those of all steps.
std::string coding_refusal(const Plan& plan, const Step& step);

}  // namespace sennit
