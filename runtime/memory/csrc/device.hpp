// SPDX-License-Identifier: Apache-2.0
// A file or block device. A read or write moves all bytes or raises.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend.hpp"

namespace sennit::memory {

class Device {
 public:
  // `name` is for messages. Offsets, sizes and addresses must be multiples of `alignment_bytes`, a power of two.
  Device(std::unique_ptr<Backend> backend, std::string name, std::uint64_t size_bytes, std::size_t alignment_bytes);
  Device(Device&&) = default;

  // Raises StoreError, naming the offset, unless all bytes were moved. May change `operations`.
  void run(std::span<Operation> operations);
  void read(std::uint64_t offset, std::span<std::byte> data);
  void write(std::uint64_t offset, std::span<std::byte> data);
  void sync();

  const std::string& name() const { return name_; }
  const char* backend_name() const { return backend_->name(); }
  std::uint64_t size_bytes() const { return size_bytes_; }
  std::size_t alignment_bytes() const { return alignment_bytes_; }

  struct Counters {
    std::uint64_t reads = 0, writes = 0, syncs = 0, bytes_read = 0, bytes_written = 0, short_transfers = 0;
  };
  const Counters& counters() const { return counters_; }

 private:
  std::unique_ptr<Backend> backend_;
  std::string name_;
  std::uint64_t size_bytes_;
  std::size_t alignment_bytes_;
  Counters counters_;
};

struct FileOptions {
  bool is_direct = true;     // past the page cache, if the file system can
  std::string backend = "";  // "io_uring", "threads"; empty: the first that works
  unsigned depth = 128;      // number of concurrent operations (io_uring)
  unsigned threads = 4;      // (threads)
};

struct OpenedFile {
  std::unique_ptr<Device> device;
  bool is_direct = false;
  std::string note;  // why direct access or io_uring was not possible if it was wanted; for display
};

// Creates the file `path` with `size_bytes` allocated, or takes a block device of at least that size. Raises
// StoreError (EEXIST, ENOSPC, …). The file is locked against other processes until the device is destroyed.
OpenedFile create_file(const std::string& path, std::uint64_t size_bytes, const FileOptions& options);

// Opens an existing one.
OpenedFile open_file(const std::string& path, const FileOptions& options);

}  // namespace sennit::memory
