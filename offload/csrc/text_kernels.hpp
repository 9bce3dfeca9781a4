// SPDX-License-Identifier: Apache-2.0
// Where the values of lines end, for several instruction sets with equal results.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sennit::offload {

struct Cuts {
  std::size_t ends = 0;      // of values: delimiters and ends of lines
  std::size_t newlines = 0;  // '\n'
  std::size_t returns = 0;   // '\r'
};

struct TextKernels {
  static constexpr std::size_t BLOCK_BYTES = 64;

  // Of one block: `ends` gets `first` + place of each delimiter and each '\n', in order. It has room for 64 of them.
  Cuts (*cut)(const char* block, char delimiter, std::uint32_t first, std::uint32_t* ends);
};

namespace portable {
extern const TextKernels TEXT_KERNELS;
}
namespace avx2 {
extern const TextKernels TEXT_KERNELS;
}
namespace avx512 {
extern const TextKernels TEXT_KERNELS;
}

// The kernels for the widest vectors of this processor.
const TextKernels& text_kernels();

}  // namespace sennit::offload
