// SPDX-License-Identifier: Apache-2.0
#include "instruction_sets.hpp"

#include <array>

namespace sennit::kernels {

#if defined(SENNIT_X86_KERNELS)
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#endif
namespace portable {
extern const Kernels kernels;
}

namespace {

struct Found {
  std::array<const Kernels*, 3> list;
  std::size_t count = 0;

  Found() {
#if defined(SENNIT_X86_KERNELS)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      list[count++] = &avx512::kernels;
    // Every processor with AVX2 has F16C.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) list[count++] = &avx2::kernels;
#endif
    list[count++] = &portable::kernels;
  }
};

}  // namespace

std::span<const Kernels* const> available_kernels() {
  static const Found found;
  return {found.list.data(), found.count};
}

const Kernels* find_kernels(std::string_view name) {
  for (const Kernels* kernels : available_kernels())
    if (name == kernels->name) return kernels;
  return nullptr;
}

}  // namespace sennit::kernels
