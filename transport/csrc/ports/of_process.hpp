// SPDX-License-Identifier: Apache-2.0
// What all groups of a process share: made by the first that asks, gone with the last that holds it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace sennit {

// Returns how often this process and its ancestors have forked since the first call.
uint64_t fork_count();

// The process's only `Shared`. A child of fork makes its own: it has none of the threads of its parent, and one of them
// may have held a lock. Throws what the constructor throws.
template <class Shared>
std::shared_ptr<Shared> of_process() {
  struct Place {
    const uint64_t forks = fork_count();
    std::mutex mutex;
    std::weak_ptr<Shared> shared;
  };
  // Never freed: groups may be alive while the process ends, and a child must not touch its parent's.
  static std::atomic<Place*> place{nullptr};
  Place* mine = place.load(std::memory_order_acquire);
  while (mine == nullptr || mine->forks != fork_count()) {
    auto fresh = std::make_unique<Place>();
    if (place.compare_exchange_strong(mine, fresh.get(), std::memory_order_acq_rel)) mine = fresh.release();
  }
  const std::lock_guard lock(mine->mutex);
  std::shared_ptr<Shared> shared = mine->shared.lock();
  if (!shared) mine->shared = shared = std::make_shared<Shared>();
  return shared;
}

}  // namespace sennit
