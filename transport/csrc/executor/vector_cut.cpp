// SPDX-License-Identifier: Apache-2.0
#include "executor/vector_cut.hpp"

#include <algorithm>

namespace sennit {
namespace {

constexpr uint64_t LINE_BYTES = 64;
// The most that all counts of the largest vector may sum up to.
constexpr uint64_t SUM_MAX_BYTES = (uint64_t{1} << 63) - 1;
constexpr uint32_t WIDTH_MAX = (1u << VectorCut::WIDTH_BITS) - 1;

uint64_t line_elements(uint32_t unit_bytes) { return std::max<uint64_t>(LINE_BYTES / unit_bytes, 1); }

}  // namespace

uint64_t VectorCut::lines(uint64_t elements, uint32_t unit_bytes) const {
  const uint64_t line = line_elements(unit_bytes);
  return (elements + line - 1) / line;
}

std::string VectorCut::refusal(uint32_t unit_bytes) const {
  if (share_count == 0 || piece_count == 0 || piece_bytes == 0 || piece_bytes % unit_bytes != 0)
    return "it cuts a vector into " + std::to_string(share_count) + " shares of " + std::to_string(piece_count) +
           " pieces of " + std::to_string(piece_bytes) + " bytes; needed: at least 1, and whole elements";
  const uint64_t fixed_bytes = counts.size() * LINE_BYTES * FILL;  // below 2^62
  const uint64_t limit =
      (SUM_MAX_BYTES - fixed_bytes) / std::max(unit_bytes, WIDTH_MAX) / std::max<uint64_t>(share_count, counts.size());
  if (elements_max > limit || piece_bytes > SUM_MAX_BYTES / piece_count)
    return "it cuts vectors of up to " + std::to_string(elements_max) + " elements; allowed: " + std::to_string(limit);
  const uint64_t share_lines = (lines(elements_max, unit_bytes) + share_count - 1) / share_count;
  const uint64_t largest = std::min(share_lines * line_elements(unit_bytes), elements_max) * unit_bytes;
  if (largest > piece_bytes * piece_count)
    return "its pieces do not hold a share of " + std::to_string(largest) + " bytes";
  for (const uint32_t count : counts) {
    if ((count & WIDTH_MAX) != 0 && count >> WIDTH_BITS >= uint64_t{share_count} * piece_count)
      return "a count is piece " + std::to_string(count >> WIDTH_BITS) + " of " +
             std::to_string(uint64_t{share_count} * piece_count);
  }
  return {};
}

std::vector<uint64_t> VectorCut::starts(uint64_t elements, uint32_t unit_bytes) const {
  const uint64_t line = line_elements(unit_bytes), line_count = lines(elements, unit_bytes);
  const uint64_t piece_elements = piece_bytes / unit_bytes;
  const auto bound = [&](uint64_t share) { return std::min(line_count * share / share_count * line, elements); };
  std::vector<uint64_t> begins;
  begins.reserve(counts.size() + 1);
  uint64_t start = 0, share = UINT64_MAX, share_elements = 0;
  for (const uint32_t count : counts) {
    begins.push_back(start);
    const uint64_t width = count & WIDTH_MAX, piece = count >> WIDTH_BITS;
    if (width == 0) {
      start = piece == FILL ? (start + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES : start + piece * LINE_BYTES;
      continue;
    }
    if (piece / piece_count != share) {
      share = piece / piece_count;
      share_elements = bound(share + 1) - bound(share);
    }
    const uint64_t before = std::min(piece % piece_count * piece_elements, share_elements);
    start += std::min(share_elements - before, piece_elements) * width;
  }
  begins.push_back(start);
  return begins;
}

}  // namespace sennit
