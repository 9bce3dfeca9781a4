// SPDX-License-Identifier: Apache-2.0
// Reads and writes by a few threads, for kernels and containers without io_uring.
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "backend.hpp"
#include "sennit/own_thread.hpp"

namespace sennit::memory {
namespace {

class ThreadBackend final : public Backend {
 public:
  ThreadBackend(int descriptor, unsigned threads) : descriptor_(descriptor) {
    // The calling thread is one of them.
    for (unsigned n = 1; n < std::max(threads, 1u); n++) workers_.emplace_back([this] { work(); });
  }

  ~ThreadBackend() override {
    {
      const std::lock_guard guard(mutex_);
      is_ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    close(descriptor_);
  }

  void run(std::span<Operation> operations) override {
    {
      const std::lock_guard guard(mutex_);
      operations_ = operations;
      next_ = 0;
      busy_ = workers_.size();
      round_++;
    }
    wake_.notify_all();
    take();
    std::unique_lock guard(mutex_);
    idle_.wait(guard, [this] { return busy_ == 0; });
  }

  int sync() override { return fdatasync(descriptor_) == 0 ? 0 : errno; }

  const char* name() const override { return "threads"; }

 private:
  void work() {
    begin_thread("sennit-rows-io");
    std::uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock guard(mutex_);
        wake_.wait(guard, [&] { return is_ending_ || round_ != seen; });
        if (is_ending_) return;
        seen = round_;
      }
      take();
      const std::lock_guard guard(mutex_);
      if (--busy_ == 0) idle_.notify_one();
    }
  }

  void take() {
    for (std::size_t n; (n = next_.fetch_add(1)) < operations_.size();) {
      Operation& operation = operations_[n];
      const iovec part{operation.data, operation.size_bytes};
      const auto offset = static_cast<off_t>(operation.offset);
      const ssize_t moved = operation.kind == Operation::Kind::READ ? preadv(descriptor_, &part, 1, offset)
                                                                    : pwritev(descriptor_, &part, 1, offset);
      operation.result = moved < 0 ? -errno : moved;
    }
  }

  int descriptor_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::span<Operation> operations_;
  std::atomic<std::size_t> next_ = 0;
  std::size_t busy_ = 0;
  std::uint64_t round_ = 0;
  bool is_ending_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_thread_backend(int descriptor, unsigned threads) {
  return std::make_unique<ThreadBackend>(descriptor, threads);
}

}  // namespace sennit::memory
