// SPDX-License-Identifier: Apache-2.0
// How a plan cuts the vector of a post, so that one plan serves vectors of many sizes (docs/reference/plans.md).
//
// The vector is cut into shares that begin on cache lines, and these into pieces of `piece_bytes`. The last pieces of
// each share are short or empty. The counts that steps name are sizes of pieces, in elements of a given width.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sennit {

struct VectorCut {
  // A count in the file: the number of a piece, and the bytes of an element. Without a width, the number is that of
  // cache lines, or FILL.
  static constexpr uint32_t WIDTH_BITS = 8;
  static constexpr uint32_t FILL = (1u << (32 - WIDTH_BITS)) - 1;  // up to the next cache line

  // Why a plan must not cut so. Empty if it may. `elements_max` is bounded, so that no sum wraps.
  std::string refusal(uint32_t unit_bytes) const;
  // Where each count begins, and the end of the last, in bytes.
  std::vector<uint64_t> starts(uint64_t elements, uint32_t unit_bytes) const;

  uint64_t elements_max = 0;
  uint64_t piece_bytes = 0;
  uint32_t share_count = 0;
  uint32_t piece_count = 0;  // of each share
  std::vector<uint32_t> counts;

 private:
  uint64_t lines(uint64_t elements, uint32_t unit_bytes) const;
};

}  // namespace sennit
