// SPDX-License-Identifier: Apache-2.0
// Combines reads of small pieces of a device into few aligned transfers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "aligned_buffer.hpp"
#include "device.hpp"

namespace sennit::memory {

struct Piece {
  std::uint64_t offset = 0;
  std::uint64_t row = 0;
  std::uint64_t line = 0;
};

// The aligned bytes that contain the pieces [first, last) of a sorted list.
struct Extent {
  std::uint64_t offset = 0, size_bytes = 0;
  std::size_t first = 0, last = 0;
};

// Joins pieces with at most `gap_bytes` between them, up to `limit_bytes` per transfer. `pieces` is sorted by offset.
// Extents to be written must not overlap, so two that share a block become one, whatever the limit.
inline std::vector<Extent> join(std::span<const Piece> pieces, std::size_t piece_bytes, std::size_t alignment_bytes,
                                std::size_t gap_bytes, std::size_t limit_bytes, bool may_overlap) {
  std::vector<Extent> extents;
  for (std::size_t n = 0; n < pieces.size(); n++) {
    const std::uint64_t low = pieces[n].offset / alignment_bytes * alignment_bytes;
    const std::uint64_t high =
        (pieces[n].offset + piece_bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
    if (!extents.empty()) {
      Extent& last = extents.back();
      const std::uint64_t end = last.offset + last.size_bytes;
      if ((low < end && !may_overlap) || (low <= end + gap_bytes && high - last.offset <= limit_bytes)) {
        last.size_bytes = std::max(high, end) - last.offset;
        last.last = n + 1;
        continue;
      }
    }
    extents.push_back({low, high - low, n, n + 1});
  }
  return extents;
}

}  // namespace sennit::memory
