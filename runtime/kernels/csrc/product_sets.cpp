// SPDX-License-Identifier: Apache-2.0
#include "instruction_sets.hpp"
#include "products.hpp"

namespace sennit::kernels {

#if defined(SENNIT_X86_KERNELS)
namespace avx512 {
void fold_products(const ProductFold& fold);
}
namespace avx2 {
void fold_products(const ProductFold& fold);
}
#endif
namespace portable {
void fold_products(const ProductFold& fold);
}

FoldProducts find_fold_products(std::string_view instruction_set) {
  if (find_kernels(instruction_set) == nullptr) return nullptr;
#if defined(SENNIT_X86_KERNELS)
  if (instruction_set == "avx512") return avx512::fold_products;
  if (instruction_set == "avx2") return avx2::fold_products;
#endif
  return portable::fold_products;
}

}  // namespace sennit::kernels
