// SPDX-License-Identifier: Apache-2.0
// What both ranks know about a message: its header, the flags of small messages, the keys of its memory.
#pragma once

#include <array>
#include <cstdint>

namespace sennit {

struct MessageHeader {
  uint64_t key;         // collectives: operation sequence << 20 | slot; P2P: 1 << 63 | tag
  uint64_t signature;   // docs/reference/plans.md
  uint64_t size_bytes;  // of the whole message
};

// Set in the key of a point-to-point message. Its receive is advertised only once its sender has asked.
inline constexpr uint64_t P2P_KEY = uint64_t{1} << 63;

enum EagerFlags : uint32_t {
  EAGER_DATA = 0,     // header + size_bytes of data
  EAGER_REQUEST = 1,  // header only: "I have this message, advertise memory for it" (large P2P)
};

}  // namespace sennit

namespace sennit::flow {

// The keys of one region of memory: one for each device that reaches it, in the devices' order.
struct Keys {
  static constexpr uint32_t MAX_COUNT = 8;

  Keys(uint32_t key = 0) : of{key} {}

  uint32_t count = 1;
  std::array<uint32_t, MAX_COUNT> of{};
};

}  // namespace sennit::flow
