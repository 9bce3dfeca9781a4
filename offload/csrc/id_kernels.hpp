// SPDX-License-Identifier: Apache-2.0
// Computations on single ids, for several instruction sets with equal results.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sennit::offload {

struct IdKernels {
  // hash_combine(salt, twang_mix64(id)), floor-mod `divisor`.
  void (*sigrid_hash)(const std::int64_t* ids, std::int64_t* out, std::size_t count, std::int64_t salt,
                      std::int64_t divisor);
  // The same of texts of 8 bytes, one behind the other, whose ids are XXH64 of their bytes (xxh64.hpp).
  void (*sigrid_hash_of_8)(const char* texts, std::int64_t* out, std::size_t count, std::int64_t salt,
                           std::int64_t divisor);
  void (*positive_modulus)(const std::int64_t* ids, std::int64_t* out, std::size_t count, std::int64_t divisor);
};

namespace portable {
extern const IdKernels ID_KERNELS;
}
namespace avx512 {
extern const IdKernels ID_KERNELS;
}

// The kernels for the widest vectors of this processor.
const IdKernels& id_kernels();
bool has_avx512();

}  // namespace sennit::offload
