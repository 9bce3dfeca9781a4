// SPDX-License-Identifier: Apache-2.0
#include "messages/signature.hpp"

#include <iterator>

namespace sennit {
namespace {

// The collective is coded. The signature has the codec and the seed in place of the elements.
constexpr uint64_t CODED = uint64_t{1} << 44;
// The seed has more than 16 bits, so its field holds a digest.
constexpr uint64_t LONG_SEED = uint64_t{1} << 45;
// The memory is a device's. A coded collective is never on a device: with CODED the bit means a codec only between
// hosts.
constexpr uint64_t ON_DEVICE = uint64_t{1} << 47;
constexpr uint64_t STOCHASTIC = 1 << 3;
constexpr uint32_t SEED_SHIFT = 16, SEED_BITS = 16;

std::string describe_codec(uint64_t signature) {
  static constexpr const char* NAMES[] = {"fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "mx4", "lossless"};
  const uint64_t kind = signature & 7, block = signature >> 4 & 0xFFF;
  std::string text = std::string(" as ") + (kind < std::size(NAMES) ? NAMES[kind] : "an unknown codec");
  if (kind >= static_cast<uint64_t>(CodecKind::fp8_e4m3) && kind != static_cast<uint64_t>(CodecKind::lossless))
    text += " in blocks of " + std::to_string(block != 0 ? block : MAX_CODEC_BLOCK);
  if ((signature & ON_DEVICE) != 0) text += " between hosts alone";
  if ((signature & STOCHASTIC) == 0) return text;
  const uint64_t seed = signature >> SEED_SHIFT & 0xFFFF;
  return text + ", rounded by " + ((signature & LONG_SEED) != 0 ? "a seed of digest " : "seed ") + std::to_string(seed);
}

}  // namespace

bool is_codec_of(uint64_t signature, const CodecSpec& codec, bool rounding) {
  const uint64_t wanted = CODED | static_cast<uint64_t>(codec.kind) | (codec.block & 0xFFF) << 4 |
                          (rounding && codec.is_stochastic ? STOCHASTIC : 0);
  return (signature & (CODED | 0xFFFF) & ~(rounding ? 0 : STOCHASTIC)) == wanted;
}

uint64_t with_seed(uint64_t signature, uint64_t seed) {
  if ((signature & CODED) == 0 || (signature & STOCHASTIC) == 0) return signature;
  if (seed >> SEED_BITS == 0) return signature | seed << SEED_SHIFT;
  // Multiplicative hashing (Knuth, The Art of Computer Programming, volume 3, section 6.4).
  return signature | LONG_SEED | (seed * 0x9E37'79B9'7F4A'7C15) >> (64 - SEED_BITS) << SEED_SHIFT;
}

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
  // The ways of an alltoall or allgather. These have no root either.
  static constexpr const char* WAYS[] = {"", " by Bruck,", " by host,", " in a ring"};
  const bool has_ways = collective == SENNIT_ALLTOALL || collective == SENNIT_ALLGATHER;
  const uint64_t way = signature >> 32 & 0xFF;
  std::string text = collective < std::size(NAMES) ? NAMES[collective] : "unknown operation";
  if (collective == SENNIT_BARRIER) return text;
  // An allreduce has no root: the field says that ranks give leaves.
  const bool is_coded = (signature & CODED) != 0;
  if (collective == SENNIT_ALLREDUCE && way != 0 && !is_coded) text += " of leaves";
  if (collective == SENNIT_ALLTOALL && way != 0) text += " of equal parts,";
  if (has_ways) text += way < std::size(WAYS) ? WAYS[way] : " in an unknown way";
  if ((signature >> 46 & 1) != 0) text += " by round trips";
  text += std::string(" of ") + dtype_name(signature >> 48 & 0xFF);
  if ((signature & ON_DEVICE) != 0 && !is_coded) text += " on a device";
  if (is_reducing) text += std::string(" (") + reduce_name(signature >> 40 & 0xF) + ")";
  if (is_coded) {
    text += describe_codec(signature);
    return is_reducing ? text + ", sizes of digest " + std::to_string(way) : text;
  }
  if (const uint64_t elements = signature & 0xFFFF'FFFF; elements != 0)
    text += ", " + std::to_string(elements) + " elements";
  if (is_rooted) text += ", root " + std::to_string(signature >> 60 << 8 | way);
  return text;
}

}  // namespace sennit
