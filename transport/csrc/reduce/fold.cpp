// SPDX-License-Identifier: Apache-2.0
#include "reduce/fold.hpp"

namespace sennit {

namespace baseline {
FoldKernel find(sennit_dtype dtype, sennit_reduce reduce);
}
#if defined(__x86_64__)
namespace avx2 {
FoldKernel find(sennit_dtype dtype, sennit_reduce reduce);
}
namespace avx512 {
FoldKernel find(sennit_dtype dtype, sennit_reduce reduce);
}
#endif

FoldKernel find_fold(sennit_dtype dtype, sennit_reduce reduce) {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx512) return avx512::find(dtype, reduce);
  if (has_avx2) return avx2::find(dtype, reduce);
#endif
  return baseline::find(dtype, reduce);
}

uint32_t element_size_bytes(sennit_dtype dtype) {
  switch (dtype) {
    case SENNIT_U8:
    case SENNIT_I8:
    case SENNIT_BOOL:
      return 1;
    case SENNIT_I16:
    case SENNIT_U16:
    case SENNIT_F16:
    case SENNIT_BF16:
      return 2;
    case SENNIT_I32:
    case SENNIT_U32:
    case SENNIT_F32:
    case SENNIT_C32:
      return 4;
    case SENNIT_I64:
    case SENNIT_U64:
    case SENNIT_F64:
    case SENNIT_C64:
      return 8;
    case SENNIT_C128:
      return 16;
  }
  return 0;
}

}  // namespace sennit
