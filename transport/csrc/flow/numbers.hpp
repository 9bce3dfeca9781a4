// SPDX-License-Identifier: Apache-2.0
// The ranges of the flow protocol's numbers (docs/reference/wire.md, Flow). Equal on both sides.
//
// They have their own file, so that the model of faults can run the same sources with numbers that wrap after a few
// packets (model/small/flow/numbers.hpp).
#pragma once
#include <cstdint>

namespace sennit::flow {

inline constexpr uint32_t INDEX_BITS = 20;
inline constexpr uint32_t CREDIT_SLOTS = 4'095;
// Credits open at a time. This is far below CREDIT_SLOTS on purpose. The advert of credit s is only sent together with
// completed_below > s - CREDIT_WINDOW. So a sender that works on s knows that the credit which had the slot of s +
// CREDIT_WINDOW before is complete, and sends nothing more for it.
inline constexpr uint32_t CREDIT_WINDOW = 256;
// Packets in one credit. Longer messages take several credits. 64 MiB of 4,096-byte packets need a bitmap of 2 KiB.
inline constexpr uint32_t CREDIT_MAX_PACKETS = 16'384;
// A SACK entry shows this many words of 64 packets, from the word of the first missing packet on. A sender stays one
// word below this, so that every packet in flight can be acknowledged.
inline constexpr uint32_t SACK_MAX_WORDS = 32;

}  // namespace sennit::flow
