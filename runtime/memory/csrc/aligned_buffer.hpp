// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>

namespace sennit::memory {

// Memory aligned for direct I/O, whatever the device's block size.
class AlignedBuffer {
 public:
  static constexpr std::size_t ALIGNMENT_BYTES = 4096;

  AlignedBuffer() = default;
  explicit AlignedBuffer(std::size_t size_bytes)
      : data_(static_cast<std::byte*>(
            std::aligned_alloc(ALIGNMENT_BYTES, (size_bytes + ALIGNMENT_BYTES - 1) & ~(ALIGNMENT_BYTES - 1)))),
        size_bytes_(size_bytes) {
    if (!data_) throw std::bad_alloc();
  }

  // Grows to at least this size. The content is lost then.
  void reserve(std::size_t size_bytes) {
    if (size_bytes > size_bytes_) *this = AlignedBuffer(size_bytes);
  }

  std::byte* data() const { return data_.get(); }
  std::size_t size_bytes() const { return size_bytes_; }
  std::span<std::byte> span() const { return {data(), size_bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  std::size_t size_bytes_ = 0;
};

}  // namespace sennit::memory
