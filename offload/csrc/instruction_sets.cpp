// SPDX-License-Identifier: Apache-2.0
#include "id_kernels.hpp"
#include "text_kernels.hpp"

namespace sennit::offload {

bool has_avx512() {
#if defined(SENNIT_X86_KERNELS)
  static const bool has =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
#else
  return false;
#endif
}

const IdKernels& id_kernels() {
#if defined(SENNIT_X86_KERNELS)
  if (has_avx512()) return avx512::ID_KERNELS;
#endif
  return portable::ID_KERNELS;
}

const TextKernels& text_kernels() {
#if defined(SENNIT_X86_KERNELS)
  static const TextKernels& best =
      __builtin_cpu_supports("avx512bw") ? avx512::TEXT_KERNELS
      : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt")
          ? avx2::TEXT_KERNELS
          : portable::TEXT_KERNELS;
  return best;
#else
  return portable::TEXT_KERNELS;
#endif
}

}  // namespace sennit::offload
