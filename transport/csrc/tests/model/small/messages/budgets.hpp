// SPDX-License-Identifier: Apache-2.0
// The budgets of messages/budgets.hpp in the model of exchanges: a few messages fill each of them.
#pragma once

#include <cstdint>

namespace sennit {

inline constexpr uint64_t MAX_LOAN_BYTES = 512;
inline constexpr uint64_t ARRIVALS_BYTES = 1'024;
inline constexpr uint64_t ARRIVAL_SHARE_MIN_BYTES = 512;
inline constexpr uint32_t NETWORK_LOANS_MAX = 3;
inline constexpr uint32_t NETWORK_LOANS_OWN = 1;
inline constexpr uint64_t EXTRA_LOANS_BELOW_BYTES = 2 * MAX_LOAN_BYTES;
inline constexpr uint64_t CONTROL_RING_BYTES = 1'024;
inline constexpr uint64_t SHM_EAGER_MAX_BYTES = 192;
inline constexpr uint64_t BULK_BLOCK_BYTES = MAX_LOAN_BYTES;
inline constexpr uint32_t BULK_BLOCKS_MAX = 4;
inline constexpr uint32_t BULK_BLOCKS_MIN = 2;
inline constexpr uint64_t BULK_BUDGET_BYTES = 4'096;
inline constexpr uint32_t RECORDS_A_ROUND = 3;
inline constexpr uint64_t DIRECT_PIECE_BYTES = 384;
inline constexpr uint32_t WATCH_ROUNDS = 3;
inline constexpr uint64_t PLACED_MAX_BYTES = 700;

}  // namespace sennit
