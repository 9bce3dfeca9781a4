// SPDX-License-Identifier: Apache-2.0
// What a request's wr_id says, so that its completion finds its owner.
#pragma once

#include <cstdint>

namespace sennit {

enum class VerbsRequest : uint8_t { send = 1, receive = 2, bind = 3 };

// `generation` of a queue pair counts its revivals: completions from before one concern nobody. `number` is the
// owner's: of a send its place in the queue, of a receive its buffer.
constexpr uint64_t request_name(VerbsRequest kind, uint8_t generation = 0, uint16_t path = 0, uint32_t number = 0) {
  return uint64_t{static_cast<uint8_t>(kind)} << 56 | uint64_t{generation} << 48 | uint64_t{path} << 32 | number;
}
constexpr VerbsRequest request_kind(uint64_t name) { return static_cast<VerbsRequest>(name >> 56); }
constexpr uint8_t request_generation(uint64_t name) { return static_cast<uint8_t>(name >> 48); }
constexpr uint16_t request_path(uint64_t name) { return static_cast<uint16_t>(name >> 32); }
constexpr uint32_t request_number(uint64_t name) { return static_cast<uint32_t>(name); }

}  // namespace sennit
