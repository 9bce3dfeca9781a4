// SPDX-License-Identifier: Apache-2.0
// For test_attention.cpp, and apart from it: compiled for AVX-512, of which nothing else may have an instruction.
#define SENNIT_ISA tested_avx512
#include "wide.hpp"

namespace sennit::kernels {

// How many numbers with this exponent have a reciprocal other than 1 / x.
std::size_t other_reciprocals(std::uint32_t exponent) {
  using namespace tested_avx512;
  std::size_t others = 0;
  for (std::uint32_t fraction = 0; fraction < 1u << 23; fraction += lanes) {
    const Words bits = lane_numbers() + (exponent << 23 | fraction);
    const Wide x = wide_of(floats_of(bits));
    const Words found = bits_of(floats_of(reciprocal(x))), expected = bits_of(floats_of(wide(1.0f) / x));
    for (std::size_t lane = 0; lane < lanes; lane++) others += found[lane] != expected[lane];
  }
  return others;
}

}  // namespace sennit::kernels
