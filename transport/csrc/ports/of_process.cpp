// SPDX-License-Identifier: Apache-2.0
#include "ports/of_process.hpp"

#include <pthread.h>

#include <system_error>

namespace sennit {

uint64_t fork_count() {
  static std::atomic<uint64_t> forks{0};
  static const int error = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_atfork");
  return forks.load(std::memory_order_relaxed);
}

}  // namespace sennit
