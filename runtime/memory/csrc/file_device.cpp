// SPDX-License-Identifier: Apache-2.0
// Opens files and block devices: direct if possible, locked, with the backend that works on this machine.
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "device.hpp"
#include "store_error.hpp"

namespace sennit::memory {
namespace {

// The alignment of direct I/O if the file system does not report it.
constexpr std::size_t DEFAULT_ALIGNMENT_BYTES = 4096;

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (value_ >= 0) close(value_);
  }
  int get() const { return value_; }
  int release() { return std::exchange(value_, -1); }

 private:
  int value_;
};

[[noreturn]] void refuse(const std::string& path, const std::string& doing, int error_number) {
  throw StoreError(Fault::DEVICE, path + ": " + doing + ": " + std::strerror(error_number), error_number);
}

// Opens for direct access, or through the page cache if the file system cannot; `note` then says so.
int open_either(const std::string& path, int flags, const FileOptions& options, bool& is_direct, std::string& note) {
  is_direct = options.is_direct;
  if (options.is_direct) {
    const int descriptor = open(path.c_str(), flags | O_DIRECT, 0600);
    if (descriptor >= 0 || errno != EINVAL) return descriptor;
    // O_CREAT created the file before O_DIRECT was refused.
    flags &= ~(O_CREAT | O_EXCL);
    note = "the file system has no direct I/O: through the page cache";
    is_direct = false;
  }
  return open(path.c_str(), flags, 0600);
}

std::size_t alignment(int descriptor, const struct stat& status, bool is_direct) {
  if (!is_direct) return 1;
  if (S_ISBLK(status.st_mode)) {
    int size = 0;
    if (ioctl(descriptor, BLKSSZGET, &size) == 0 && size > 0) return static_cast<std::size_t>(size);
    return DEFAULT_ALIGNMENT_BYTES;
  }
#ifdef STATX_DIOALIGN
  struct statx found {};
  if (statx(descriptor, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 && (found.stx_mask & STATX_DIOALIGN) != 0 &&
      found.stx_dio_offset_align != 0)
    return std::max<std::size_t>(found.stx_dio_offset_align, found.stx_dio_mem_align);
#endif
  return DEFAULT_ALIGNMENT_BYTES;
}

std::uint64_t size_of(int descriptor, const struct stat& status, const std::string& path) {
  if (S_ISREG(status.st_mode)) return static_cast<std::uint64_t>(status.st_size);
  std::uint64_t size = 0;
  if (!S_ISBLK(status.st_mode)) throw StoreError(Fault::ARGUMENT, path + ": neither a file nor a block device", EINVAL);
  if (ioctl(descriptor, BLKGETSIZE64, &size) != 0) refuse(path, "asking for the size of the device", errno);
  return size;
}

void lock(int descriptor, const std::string& path) {
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0)
    refuse(path, errno == EWOULDBLOCK ? "another process has this store open" : "locking", errno);
}

OpenedFile finish(Descriptor descriptor, const struct stat& status, const std::string& path, bool is_direct,
                  std::string note, const FileOptions& options) {
  OpenedFile opened;
  const std::uint64_t size_bytes = size_of(descriptor.get(), status, path);
  const std::size_t alignment_bytes = alignment(descriptor.get(), status, is_direct);
  std::unique_ptr<Backend> backend;
  if (options.backend.empty() || options.backend == "io_uring") {
    std::string problem;
    backend = make_uring_backend(descriptor.get(), options.depth, problem);
    if (!backend) {
      if (!options.backend.empty()) throw StoreError(Fault::ARGUMENT, path + ": backend io_uring: " + problem);
      note += (note.empty() ? "" : "; ") + ("no io_uring: " + problem);
    }
  } else if (options.backend != "threads") {
    throw StoreError(Fault::ARGUMENT, "backend '" + options.backend + "'; allowed: io_uring, threads");
  }
  if (!backend) backend = make_thread_backend(descriptor.get(), options.threads);
  descriptor.release();  // the backend closes it
  opened.device = std::make_unique<Device>(std::move(backend), path, size_bytes, alignment_bytes);
  opened.is_direct = is_direct;
  opened.note = std::move(note);
  return opened;
}

}  // namespace

OpenedFile create_file(const std::string& path, std::uint64_t size_bytes, const FileOptions& options) {
  bool is_direct = false;
  std::string note;
  struct stat status {};
  const bool is_device = stat(path.c_str(), &status) == 0 && S_ISBLK(status.st_mode);
  const int flags = O_RDWR | O_CLOEXEC | (is_device ? O_EXCL : O_CREAT | O_EXCL);
  Descriptor descriptor(open_either(path, flags, options, is_direct, note));
  if (descriptor.get() < 0) refuse(path, is_device ? "opening the device" : "making the file", errno);
  lock(descriptor.get(), path);
  if (is_device) {
    if (const std::uint64_t has = size_of(descriptor.get(), status, path); has < size_bytes)
      throw StoreError(
          Fault::DEVICE,
          path + ": the store takes " + std::to_string(size_bytes) + " bytes, the device has " + std::to_string(has),
          ENOSPC);
  } else if (fallocate(descriptor.get(), 0, 0, static_cast<off_t>(size_bytes)) != 0) {
    const int error_number = errno;
    unlink(path.c_str());
    refuse(path, "setting " + std::to_string(size_bytes) + " bytes aside", error_number);
  }
  if (fstat(descriptor.get(), &status) != 0) refuse(path, "fstat", errno);
  return finish(Descriptor(descriptor.release()), status, path, is_direct, std::move(note), options);
}

OpenedFile open_file(const std::string& path, const FileOptions& options) {
  bool is_direct = false;
  std::string note;
  Descriptor descriptor(open_either(path, O_RDWR | O_CLOEXEC, options, is_direct, note));
  if (descriptor.get() < 0) refuse(path, "opening", errno);
  lock(descriptor.get(), path);
  struct stat status {};
  if (fstat(descriptor.get(), &status) != 0) refuse(path, "fstat", errno);
  return finish(Descriptor(descriptor.release()), status, path, is_direct, std::move(note), options);
}

}  // namespace sennit::memory
