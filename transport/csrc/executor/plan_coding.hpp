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

// The length of a coded form without fixed size, in bytes, as u64. It stands before the coded form.
inline constexpr uint64_t LENGTH_BYTES = 8;

inline bool is_lossless(const Step& step) { return static_cast<CodecKind>(step.reduce) == CodecKind::lossless; }

// The bytes of the coded form of so many bytes of elements; for lossless the most that it may take.
uint64_t coded_bytes(const Step& step, uint64_t size_bytes);

// Why so many bytes cannot be coded from byte `from` of the operand to byte `to` of the destination, as the end of a
// sentence; empty if they can.
std::string coded_range_refusal(const Step& step, const Operand& operand, uint64_t from, uint64_t to,
                                uint64_t size_bytes);

// Whether a step's codes or message come behind their length.
bool is_sized(const Step& step);

// The rule that a message with a length breaks, in the form of coding_refusal.
std::string sized_refusal(const Plan& plan, const Step& step);

// The rule that a step breaks, as the end of a sentence; empty if it breaks none. Places in buffers and loans are
// checked as those of all steps.
std::string coding_refusal(const Plan& plan, const Step& step);

}  // namespace sennit
