// SPDX-License-Identifier: Apache-2.0
#include "messages/signature.hpp"

#include <iterator>

namespace sennit {

const char* dtype_name(uint32_t dtype) {
  static constexpr const char* NAMES[] = {"uint8",    "int8",    "int16",   "int32",     "int64",      "float16",
                                          "bfloat16", "float32", "float64", "complex64", "complex128", "bool",
                                          "uint16",   "uint32",  "uint64",  "complex32"};
  return dtype < std::size(NAMES) ? NAMES[dtype] : "bytes";
}

const char* reduce_name(uint32_t reduce) {
  static constexpr const char* NAMES[] = {"sum",         "avg",        "product",     "min",       "max",
                                          "bitwise and", "bitwise or", "bitwise xor", "premul sum"};
  return reduce < std::size(NAMES) ? NAMES[reduce] : "none";
}

std::string describe_signature(uint64_t signature) {
  static constexpr const char* NAMES[] = {"?",       "allreduce",      "reduce",   "broadcast", "allgather", "gather",
                                          "scatter", "reduce_scatter", "alltoall", "send/recv", "barrier"};
  const uint8_t collective = collective_of(signature);
  const bool is_reducing =
      collective == SENNIT_ALLREDUCE || collective == SENNIT_REDUCE || collective == SENNIT_REDUCE_SCATTER;
  const bool is_rooted = collective == SENNIT_REDUCE || collective == SENNIT_BROADCAST || collective == SENNIT_GATHER ||
                         collective == SENNIT_SCATTER;
  // Of an alltoall or allgather, which have no root either.
  static constexpr const char* WAYS[] = {"", " of equal parts, by Bruck,", " of equal parts, by host,", " in a ring"};
  const bool has_ways = collective == SENNIT_ALLTOALL || collective == SENNIT_ALLGATHER;
  const uint64_t way = signature >> 32 & 0xFF;
  std::string text = collective < std::size(NAMES) ? NAMES[collective] : "unknown operation";
  if (collective == SENNIT_BARRIER) return text;
  // An allreduce has no root: the field says that ranks give leaves.
  if (collective == SENNIT_ALLREDUCE && way != 0) text += " of leaves";
  if (has_ways) text += way < std::size(WAYS) ? WAYS[way] : " in an unknown way";
  if ((signature >> 46 & 1) != 0) text += " by round trips";
  text += std::string(" of ") + dtype_name(signature >> 48 & 0xFF);
  if ((signature >> 47 & 1) != 0) text += " on a device";
  if (is_reducing) text += std::string(" (") + reduce_name(signature >> 40 & 0x3F) + ")";
  if (const uint64_t elements = signature & 0xFFFF'FFFF; elements != 0)
    text += ", " + std::to_string(elements) + " elements";
  if (is_rooted) text += ", root " + std::to_string(way);
  return text;
}

}  // namespace sennit
