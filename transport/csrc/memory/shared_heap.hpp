// SPDX-License-Identifier: Apache-2.0
// Memory of this process that the other processes of the host map: what lies here is copied once on its way to another
// rank, or not at all where that rank only sums it.
//
// The heap is one sparse memfd (memfd_create(2)), mapped once as a whole. So a process that knows the heap reaches all
// later allocations as well, nothing has a name in /dev/shm, and the kernel frees the memory with the last process that
// maps it: also if the owner was killed, and not before a reader is done. Its size in addresses is that of the
// machine's memory. Pages come with allocations.
//
// Others open it as /proc/PID/fd/FD, which needs the same user and the same pid namespace, and check a nonce.
//
// In a child of fork the heap becomes private: the child's writes stay its own. But it is no snapshot: a page that the
// child has not written shows what the parent writes there after the fork. It gets a heap of its own with its first
// allocation.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace sennit {

// Where other processes of the host find a heap.
struct SharedHeapName {
  uint64_t nonce;
  uint64_t size_bytes;
  int32_t process;
  int32_t descriptor;
};

class SharedHeap {
 public:
  static constexpr uint64_t PAGE_BYTES = 4'096;
  // The most freed memory that stays with the process, so that the next allocation need not wait for fresh pages.
  static constexpr uint64_t KEPT_MAX_BYTES = 268'435'456;

  // Memory of at least this size, aligned to a page, with any content. Null if there is none: no descriptor, no
  // addresses, or less memory free than asked for. The caller then uses other memory. Any thread may call it.
  static void* allocate(uint64_t size_bytes) noexcept;
  // False if the memory is not of this heap.
  static bool free(void* memory) noexcept;
  // Whether all of the range lies in the heap of this process.
  static bool contains(const void* data, uint64_t size_bytes) noexcept {
    const uint64_t end = end_.load(std::memory_order_acquire);
    const uint64_t at = offset_of(data);
    return at < end && size_bytes <= end - at;
  }
  // Whether the range lies in this heap, in one that was detached, or in that of a process from which this one was
  // forked.
  static bool owns(const void* data, uint64_t size_bytes) noexcept;
  // The offset in the heap of a range that the heap contains.
  static uint64_t offset_of(const void* data) noexcept {
    return reinterpret_cast<uintptr_t>(data) - base_.load(std::memory_order_relaxed);
  }
  // The name of the heap. There is none before the first allocation.
  static std::optional<SharedHeapName> name() noexcept;
  // For memory that must be handed back while a process that was stopped may go on writing to it. The process's own
  // view of these pages is replaced by a copy, so that late writes reach nobody. From then on nothing counts as in the
  // heap, and it gives no more memory.
  static void detach(const void* data, uint64_t size_bytes) noexcept;
  static uint64_t used_bytes() noexcept;
  static uint64_t kept_bytes() noexcept;

 private:
  friend class SharedHeapState;
  static inline std::atomic<uintptr_t> base_{0};
  static inline std::atomic<uint64_t> end_{0};  // 0: there is no heap
};

// Another process's heap, as this process maps it.
class PeerHeap {
 public:
  // Null if it cannot be reached. All groups of this process share one mapping.
  static std::shared_ptr<const PeerHeap> open(const SharedHeapName& name);

  PeerHeap(const PeerHeap&) = delete;
  ~PeerHeap();
  // Null if the range is not inside.
  std::byte* at(uint64_t offset, uint64_t size_bytes) const {
    return offset <= size_bytes_ && size_bytes <= size_bytes_ - offset ? base_ + offset : nullptr;
  }

 private:
  PeerHeap(std::byte* base, uint64_t size_bytes) : base_(base), size_bytes_(size_bytes) {}

  std::byte* const base_;
  const uint64_t size_bytes_;
};

}  // namespace sennit
