// SPDX-License-Identifier: Apache-2.0
// What a flow learns of one path from the peer's echoes: the input of path policies and congestion control.
#pragma once
#include <cstdint>

namespace sennit::flow {

// Since the echo before of the same path. Counts are arrivals at the peer, duplicates included.
struct PathFeedback {
  uint64_t now_us;
  uint32_t path;
  uint32_t received_packets;
  uint32_t marked_packets;  // of them, with the ECN codepoint "congestion experienced" (RFC 3168)
  uint64_t fabric_us;       // round trip without the waits inside both hosts; 0: no sample
  uint64_t fabric_min_us;   // the least of its rail so far
  uint64_t queue_us() const { return fabric_us > fabric_min_us ? fabric_us - fabric_min_us : 0; }
};

}  // namespace sennit::flow
