// SPDX-License-Identifier: Apache-2.0
// What is computed for each id alone, for several instruction sets. The results are the same.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sennit::offload {

struct IdKernels {
  // hash_combine(salt, twang_mix64(id)), floor-mod `divisor`.
  void (*sigrid_hash)(const std::int64_t* ids, std::int64_t* out, std::size_t count, std::int64_t salt,
                      std::int64_t divisor);
  void (*positive_modulus)(const std::int64_t* ids, std::int64_t* out, std::size_t count, std::int64_t divisor);
};

namespace portable {
extern const IdKernels ID_KERNELS;
}
namespace avx512 {
extern const IdKernels ID_KERNELS;
}

// Those for the widest vectors that this processor has.
const IdKernels& id_kernels();
bool has_avx512();

}  // namespace sennit::offload
