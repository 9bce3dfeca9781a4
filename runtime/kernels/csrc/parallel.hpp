// SPDX-License-Identifier: Apache-2.0
// Runs jobs on threads that live only as long as the jobs: no thread idles, and a fork loses nothing.
#pragma once

#include <atomic>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace sennit::kernels {

// Calls job(n, worker) for each n below `count` on up to `threads` threads, including the caller's. `worker` is below
// `threads` and differs between concurrent jobs. Jobs start in the order of n. They must not throw.
template <typename Job>
void parallel_for(unsigned threads, std::size_t count, Job job) {
  std::atomic<std::size_t> next{0};
  const auto work = [&](unsigned worker) {
    for (std::size_t n; (n = next.fetch_add(1, std::memory_order_relaxed)) < count;) job(n, worker);
  };
  std::vector<std::jthread> others;
  try {
    for (unsigned worker = 1; worker < threads && worker < count; worker++) others.emplace_back(work, worker);
  } catch (const std::system_error&) {
    // The system has no more threads. The existing ones do the work.
  }
  work(0);
}

}  // namespace sennit::kernels
