// SPDX-License-Identifier: Apache-2.0
// How much a rank and its lanes keep for their peers, and when a message takes another way. All in one file, so that
// the model of exchanges (tests/model/exchange) can run the same sources with budgets of a few messages.
#pragma once

#include <cstdint>

namespace sennit {

// docs/reference/plans.md rule 3: the largest receive without destination.
inline constexpr uint64_t MAX_LOAN_BYTES = 131'072;

// Kept unexpected messages: of all peers while nothing here waits for them, divided evenly ...
inline constexpr uint64_t ARRIVALS_BYTES = 16'777'216;
// ... but at least this much for each, about the share of a peer in a world of 64.
inline constexpr uint64_t ARRIVAL_SHARE_MIN_BYTES = 262'144;

// Networks: how many receives without destination a lane has at a time, and how many of them do not depend on what
// other lanes of the process have. The others have this much memory.
inline constexpr uint32_t NETWORK_LOANS_MAX = 8;
inline constexpr uint32_t NETWORK_LOANS_OWN = 3;
inline constexpr uint64_t EXTRA_LOANS_BELOW_BYTES = 33'554'432;

// Shared memory: the ring of a lane, with eager messages, adverts and fragments; what is eager there; and the blocks.
inline constexpr uint64_t CONTROL_RING_BYTES = 65'536;
inline constexpr uint64_t SHM_EAGER_MAX_BYTES = 8'192;
inline constexpr uint64_t BULK_BLOCK_BYTES = MAX_LOAN_BYTES;
inline constexpr uint32_t BULK_BLOCKS_MAX = 4;  // all of them fit easily into the second-level cache
inline constexpr uint32_t BULK_BLOCKS_MIN = 2;  // a loan, which is enough for every plan, and one for the rest
inline constexpr uint64_t BULK_BUDGET_BYTES = 16'777'216;  // for all inboxes of a rank

// What a lane of shared memory does in one round, so that both directions and all peers take turns.
inline constexpr uint32_t RECORDS_A_ROUND = 64;
inline constexpr uint64_t DIRECT_PIECE_BYTES = 262'144;
// A lane that was visited this often without a result is visited again when its peer has set its bit. Long enough that
// a busy lane never costs its peer an atomic operation, and short beside the time between two operations.
inline constexpr uint32_t WATCH_ROUNDS = 1'024;
// Up to this size a message was mostly made just now, and its bytes are in the sender's cache: the sender places it.
// Larger messages are copied by the receiver, so that the receivers of one sender share the work.
inline constexpr uint64_t PLACED_MAX_BYTES = 262'144;

}  // namespace sennit
