// SPDX-License-Identifier: Apache-2.0
// Numbers that wrap within one schedule. Only fault_model_small finds this file before flow/numbers.hpp.
#pragma once
#include <cstdint>

namespace sennit::flow {

inline constexpr uint32_t INDEX_BITS = 7;
inline constexpr uint32_t CREDIT_SLOTS = 31;
inline constexpr uint32_t CREDIT_WINDOW = 8;
inline constexpr uint32_t CREDIT_MAX_PACKETS = 96;
inline constexpr uint32_t SACK_MAX_WORDS = 2;

}  // namespace sennit::flow
