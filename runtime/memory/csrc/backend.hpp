// SPDX-License-Identifier: Apache-2.0
// How a batch of reads and writes reaches a file or block device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace sennit::memory {

struct Operation {
  enum class Kind : std::uint8_t { READ, WRITE };

  Kind kind = Kind::READ;
  std::uint64_t offset = 0;
  std::byte* data = nullptr;
  std::size_t size_bytes = 0;
  // As of pread(2): bytes moved, perhaps fewer than asked for, or a negative errno.
  std::int64_t result = 0;
};

// Moves bytes, and may move fewer than asked for: `Device` asks again. Used by one thread at a time.
class Backend {
 public:
  virtual ~Backend() = default;
  // Ends when all have a result. They may happen in any order, so none may overlap another that writes.
  virtual void run(std::span<Operation> operations) = 0;
  // What was written before is on stable storage afterwards; 0 or an errno.
  virtual int sync() = 0;
  virtual const char* name() const = 0;
};

// Through liburing, found at run time; nothing where the library or the kernel's permission is missing, and then
// `problem` says which.
std::unique_ptr<Backend> make_uring_backend(int descriptor, unsigned depth, std::string& problem);

// preadv and pwritev by `threads` threads.
std::unique_ptr<Backend> make_thread_backend(int descriptor, unsigned threads);

}  // namespace sennit::memory
