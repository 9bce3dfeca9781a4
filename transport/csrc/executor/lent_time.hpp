// SPDX-License-Identifier: Apache-2.0
// Processor time that threads of the caller spend in the transport: they post, and drive the engine while they wait.
//
// Counted only while somebody asks: reading a thread's clock is a system call. Threads of the transport are not in it,
// since whoever asks finds them by their names.
#pragma once

#include <cstdint>

namespace sennit {

class LentTime {
 public:
  // While this object lives, the calling thread is in the transport. Objects may nest.
  LentTime() noexcept;
  ~LentTime();
  LentTime(const LentTime&) = delete;
  LentTime& operator=(const LentTime&) = delete;

  // Each call with true takes one with false. From several threads at a time.
  static void count(bool is_on) noexcept;
  static uint64_t total_ns() noexcept;  // of all threads of the process, while it was counted

 private:
  uint64_t began_ns_;
};

// begin_thread (sennit/own_thread.hpp) for a thread of the transport. What it does is not lent.
void begin_own_thread(const char* name) noexcept;

}  // namespace sennit
