// SPDX-License-Identifier: Apache-2.0
#include "executor/scratch.hpp"

#include <algorithm>
#include <new>
#include <utility>

#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(memory, size)
#define ASAN_UNPOISON_MEMORY_REGION(memory, size)
#endif

namespace sennit {
namespace {

constexpr size_t KEPT_BLOCKS_MAX = 16;
constexpr std::align_val_t PAGE{4'096};

std::byte* allocate(uint64_t size_bytes) { return static_cast<std::byte*>(operator new(size_bytes, PAGE)); }

void drop(std::byte* memory, uint64_t size_bytes) noexcept {
  ASAN_UNPOISON_MEMORY_REGION(memory, size_bytes);
  operator delete(memory, PAGE);
}

}  // namespace

void ScratchPool::Return::operator()(std::byte* memory) const noexcept { pool->give_back(memory, size_bytes); }

ScratchPool::~ScratchPool() {
  for (const Block& block : kept_) drop(block.memory, block.size_bytes);
}

ScratchPool& ScratchPool::shared() {
  static auto* const pool = new ScratchPool;
  return *pool;
}

uint64_t ScratchPool::kept_bytes() const {
  const std::lock_guard lock(mutex_);
  return kept_bytes_;
}

ScratchPool::Memory ScratchPool::take(uint64_t size_bytes) {
  // Not far larger, because a small operation would keep the memory of a large one.
  const auto fits = [size_bytes](const Block& block) {
    return block.size_bytes >= size_bytes && block.size_bytes / 2 <= size_bytes;
  };
  if (size_bytes >= POOLED_MIN_BYTES) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    const auto found = lock ? std::find_if(kept_.rbegin(), kept_.rend(), fits) : kept_.rend();
    if (found != kept_.rend()) {
      const Block block = *found;
      kept_.erase(std::next(found).base());
      kept_bytes_ -= block.size_bytes;
      ASAN_UNPOISON_MEMORY_REGION(block.memory, block.size_bytes);
      return {block.memory, {this, block.size_bytes}};
    }
  }
  return {allocate(size_bytes), {this, size_bytes}};
}

void ScratchPool::give_back(std::byte* memory, uint64_t size_bytes) noexcept {
  if (size_bytes < POOLED_MIN_BYTES || size_bytes > KEPT_MAX_BYTES) return drop(memory, size_bytes);
  std::vector<Block> dropped;
  {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return drop(memory, size_bytes);
    try {
      kept_.reserve(KEPT_BLOCKS_MAX);
      dropped.reserve(KEPT_BLOCKS_MAX);
    } catch (const std::bad_alloc&) {
      return drop(memory, size_bytes);
    }
    while (kept_.size() == KEPT_BLOCKS_MAX || kept_bytes_ + size_bytes > KEPT_MAX_BYTES) {
      dropped.push_back(kept_.front());
      kept_bytes_ -= kept_.front().size_bytes;
      kept_.erase(kept_.begin());
    }
    // Whoever writes here although the operation has ended is found out.
    ASAN_POISON_MEMORY_REGION(memory, size_bytes);
    kept_.push_back({memory, size_bytes});
    kept_bytes_ += size_bytes;
  }
  for (const Block& block : dropped) drop(block.memory, block.size_bytes);
}

}  // namespace sennit
