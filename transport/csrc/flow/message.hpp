// SPDX-License-Identifier: Apache-2.0
// What both ranks know of a message, and how small ones are marked on their way.
#pragma once

#include <cstdint>

namespace sennit {

struct MessageHeader {
  uint64_t key;         // collectives: operation sequence << 20 | slot; P2P: 1 << 63 | tag
  uint64_t signature;   // docs/reference/plans.md
  uint64_t size_bytes;  // of the whole message
};

enum EagerFlags : uint32_t {
  EAGER_DATA = 0,     // header + size_bytes of data
  EAGER_REQUEST = 1,  // header only: "I have this message, advertise memory for it" (large P2P)
};

}  // namespace sennit
