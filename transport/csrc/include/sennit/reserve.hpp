// SPDX-License-Identifier: Apache-2.0
// Memory for files that several processes map: what is there at once cannot be missing later, as a SIGBUS.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

namespace sennit {

// Allocates these bytes of a file. Returns 0, or an error of posix_fallocate(3) other than EINTR.
inline int reserve(int fd, uint64_t offset, uint64_t size_bytes) {
  // Where a signal ends a call, Linux takes back what the call had got (mm/shmem.c; not all versions). So a call asks
  // for what comes between two signals of a profiler, and only that is asked for again.
  constexpr uint64_t CALL_BYTES = 524'288;
  const uint64_t end = offset + size_bytes;
  while (offset < end) {
    const uint64_t bytes = std::min(CALL_BYTES, end - offset);
    const int error = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    if (error == 0) offset += bytes;
    if (error != 0 && error != EINTR) return error;
  }
  return 0;
}

}  // namespace sennit
