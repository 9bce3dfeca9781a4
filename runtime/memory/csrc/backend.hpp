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
  // As from pread(2): bytes moved, perhaps fewer than requested, or a negative errno.
  std::int64_t result = 0;
};

// Moves bytes, perhaps fewer than requested: `Device` then asks again. One thread uses it at a time.
class Backend {
 public:
  virtual ~Backend() = default;
  // Returns when all operations have a result. They run in any order, so none may overlap a write of another.
  virtual void run(std::span<Operation> operations) = 0;
  // Makes all earlier writes durable. Returns 0 or an errno.
  virtual int sync() = 0;
  virtual const char* name() const = 0;
};

// Uses liburing, which is found at run time. Null if the library or the kernel's permission is missing; `problem` says
// which.
std::unique_ptr<Backend> make_uring_backend(int descriptor, unsigned depth, std::string& problem);

// Uses preadv and pwritev on `threads` threads.
std::unique_ptr<Backend> make_thread_backend(int descriptor, unsigned threads);

}  // namespace sennit::memory
