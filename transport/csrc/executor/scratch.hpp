// SPDX-License-Identifier: Apache-2.0
// Memory for the scratch of operations, kept from one operation to the next, for all groups of the process.
//
// The kernel clears fresh pages, and faults on each of them. ReduceScatter of 64 MiB by halving among 8 ranks on 2
// cores took 2.4 times as long with fresh scratch for each operation (measured on an AMD EPYC over UDP).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace sennit {

class ScratchPool {
 public:
  // malloc itself keeps what is smaller.
  static constexpr uint64_t POOLED_MIN_BYTES = 131'072;
  // The most memory that is kept while no operation uses it.
  static constexpr uint64_t KEPT_MAX_BYTES = 134'217'728;

  struct Return {
    ScratchPool* pool = nullptr;
    uint64_t size_bytes = 0;
    void operator()(std::byte* memory) const noexcept;
  };
  using Memory = std::unique_ptr<std::byte[], Return>;

  ScratchPool() = default;
  ScratchPool(const ScratchPool&) = delete;
  ~ScratchPool();

  // Memory of at least this size, with any content. Throws std::bad_alloc. The pool must outlive it.
  Memory take(uint64_t size_bytes);
  uint64_t kept_bytes() const;

  // The pool of the process, which is never destroyed.
  static ScratchPool& shared();

 private:
  struct Block {
    std::byte* memory;
    uint64_t size_bytes;
  };
  void give_back(std::byte* memory, uint64_t size_bytes) noexcept;

  // Only ever tried: a child of fork may find it locked by a thread of its parent, and works without the pool then.
  mutable std::mutex mutex_;
  std::vector<Block> kept_;  // oldest first
  uint64_t kept_bytes_ = 0;
};

}  // namespace sennit
