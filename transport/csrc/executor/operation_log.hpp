// SPDX-License-Identifier: Apache-2.0
// When the operations of this process ran, for timelines (docs/reference/timeline.md): a ring that keeps the last ones.
//
// It is off until begin(). Then an operation notes its times, and is written down when its last owner lets it go. The
// ring lies in a file that other processes read after this one has been killed (runtime/timeline/rank_log.py).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <type_traits>
#include <unordered_map>

namespace sennit {

// The time of CLOCK_MONOTONIC, like Python's time.monotonic_ns.
uint64_t clock_ns();

// Kept by the operation itself. All zero while the log is off.
struct OperationTimes {
  uint64_t posted_ns = 0;
  uint64_t returned_ns = 0;          // the call that posted it was over
  std::atomic<uint64_t> wait_ns{0};  // the first wait for it began; 0: nobody waited
  uint64_t end_ns = 0;
  uint32_t posting_thread = 0, waiting_thread = 0;  // of the kernel

  void note_post();
  // Any thread may call it. The first call counts.
  void note_wait();
};

// The layout of a record in the file.
struct OperationRecord {
  uint64_t number = 0;    // from 1, in the order of add(); 0: not there, or half written. It is written last
  uint64_t sequence = 0;  // in the group; 0: point-to-point
  uint64_t sent_bytes = 0, received_bytes = 0;
  uint64_t posted_ns = 0, returned_ns = 0, wait_ns = 0, end_ns = 0;
  int32_t status = 0;
  uint32_t posting_thread = 0, waiting_thread = 0, reserved = 0;
  std::array<char, 40> name{};   // of the plan, cut; ends with a zero
  std::array<char, 48> group{};  // its name, cut; ends with a zero. Empty: it has none

  void set(const OperationTimes& times, std::string_view plan_name);
};
static_assert(sizeof(OperationRecord) == 168 && std::is_trivially_copyable_v<OperationRecord>);

class OperationLog {
 public:
  OperationLog() = default;
  OperationLog(const OperationLog&) = delete;
  OperationLog& operator=(const OperationLog&) = delete;
  ~OperationLog() { end(); }

  // The process's. It is never destroyed, because operations may end later than everything else.
  static OperationLog& shared();

  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }
  // Writes to this file from now on, at this offset, a multiple of the page size: a ring of `room` records, which are
  // zero. Throws std::invalid_argument if the file ends before the ring, std::system_error if it cannot be mapped.
  void begin(int fd, uint64_t offset, size_t room);
  void end();

  // Records of this host, until another one has its address, belong to the group of this name.
  void name_group(const void* host, std::string_view name);
  // Adds the record of an operation of `host`.
  void add(const void* host, OperationRecord record) noexcept;

 private:
  std::atomic<bool> is_on_{false};
  std::mutex mutex_;
  OperationRecord* ring_ = nullptr;
  size_t room_ = 0;
  uint64_t added_ = 0;
  std::unordered_map<const void*, std::array<char, 48>> group_of_;
};

}  // namespace sennit
