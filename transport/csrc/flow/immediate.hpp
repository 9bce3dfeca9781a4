// SPDX-License-Identifier: Apache-2.0
// The immediate of a data packet, and the sequence numbers behind it (docs/reference/wire.md, Flow).
//
// A verbs completion shows immediate, length and queue pair, but not the RETH. So the immediate alone names the packet.
// Sequence numbers have 64 bits inside the flow and travel as their low bits.
#pragma once
#include <cstdint>

#include "flow/numbers.hpp"

namespace sennit::flow {

inline constexpr uint32_t INDEX_MASK = (1u << INDEX_BITS) - 1;
inline constexpr uint32_t EAGER_SLOT = 0;
inline constexpr uint32_t CREDIT_WINDOW_WORDS = (CREDIT_WINDOW + 63) / 64;
inline constexpr uint32_t SACK_REACH_PACKETS = (SACK_MAX_WORDS - 1) * 64;

// A probe of a trial to a device (ports/trial.hpp). No packet of a credit has this index.
inline constexpr uint32_t PROBE_IMMEDIATE = 0xFFFF'FFFF;
static_assert(CREDIT_MAX_PACKETS <= INDEX_MASK);

constexpr uint32_t make_immediate(uint32_t slot, uint32_t index) { return slot << INDEX_BITS | index; }
constexpr uint32_t slot_of(uint32_t immediate) { return immediate >> INDEX_BITS; }
constexpr uint32_t index_of(uint32_t immediate) { return immediate & INDEX_MASK; }
constexpr uint32_t credit_slot(uint64_t credit) { return 1 + static_cast<uint32_t>(credit % CREDIT_SLOTS); }

// Serial arithmetic (RFC 1982): the number nearest to `reference` whose low `BITS` bits are `low`. A number below zero
// wraps to a huge one, which every range check then refuses.
template <unsigned BITS>
constexpr uint64_t nearest(uint32_t low, uint64_t reference) {
  const uint32_t shift = 32 - BITS;
  const auto difference = static_cast<int32_t>((low - static_cast<uint32_t>(reference)) << shift) >> shift;
  return reference + static_cast<uint64_t>(static_cast<int64_t>(difference));
}

}  // namespace sennit::flow
