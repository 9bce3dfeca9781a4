// SPDX-License-Identifier: Apache-2.0
// Memory that is read at random: on huge pages if the kernel has them, since each small page would miss the TLB.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>

namespace sennit::kernels {

template <typename T>
struct HugePages {
  using value_type = T;
  static constexpr std::size_t PAGE_BYTES = 2 << 20;

  HugePages() = default;
  template <typename Other>
  HugePages(const HugePages<Other>&) {}
  bool operator==(const HugePages&) const = default;

  // Below a page, as any memory.
  T* allocate(std::size_t count) {
    const std::size_t size_bytes = count * sizeof(T);
    const bool is_large = size_bytes >= PAGE_BYTES;
    const std::size_t rounded = is_large ? (size_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES : size_bytes;
    void* const memory = is_large ? std::aligned_alloc(PAGE_BYTES, rounded) : std::malloc(rounded);
    if (memory == nullptr) throw std::bad_alloc();
    if (is_large) madvise(memory, rounded, MADV_HUGEPAGE);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t) { std::free(memory); }
};

}  // namespace sennit::kernels
