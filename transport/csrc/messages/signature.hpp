// SPDX-License-Identifier: Apache-2.0
// What a message belongs to, in 64 bits that travel with it: collective, element type, reduction, root, element count
// (docs/reference/plans.md, "Signature"). The signature shows ranks that they run different collectives.
#pragma once

#include <cstdint>
#include <string>

#include "codec/codec.hpp"
#include "sennit/core.h"

namespace sennit {

constexpr uint8_t collective_of(uint64_t signature) { return signature >> 56 & 0xF; }
// Whether the signature of a plan names this codec. With `rounding` false, the rounding need not be the same.
bool is_codec_of(uint64_t signature, const CodecSpec& codec, bool rounding);
// The signature of a run with this seed. Only that of a plan that rounds at random changes: it names the seed.
uint64_t with_seed(uint64_t signature, uint64_t seed);
// "allreduce of float32 (sum), 1024 elements"
std::string describe_signature(uint64_t signature);

const char* dtype_name(uint32_t dtype);
const char* reduce_name(uint32_t reduce);

}  // namespace sennit
