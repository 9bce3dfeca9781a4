// SPDX-License-Identifier: Apache-2.0
// When the operations of this process ran, for timelines (docs/reference/timeline.md): a ring that keeps the last ones.
//
// It is off until begin(). Then an operation notes its times, and is written down when its last owner lets it go.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sennit {

// Of CLOCK_MONOTONIC, as Python's time.monotonic_ns.
uint64_t clock_ns();

// Kept by the operation itself. All zero while the log is off.
struct OperationTimes {
  uint64_t posted_ns = 0;
  uint64_t returned_ns = 0;          // the call that posted it was over
  std::atomic<uint64_t> wait_ns{0};  // the first wait for it began; 0: nobody waited
  uint64_t end_ns = 0;
  uint32_t posting_thread = 0, waiting_thread = 0;  // of the kernel

  void note_post();
  // From any thread: the first one counts.
  void note_wait();
};

struct OperationRecord {
  static constexpr uint32_t NO_GROUP = UINT32_MAX;

  uint32_t group = NO_GROUP;  // of OperationLog::Content::groups
  int status = 0;
  uint64_t sequence = 0;  // in the group; 0: point-to-point
  uint64_t sent_bytes = 0, received_bytes = 0;
  uint64_t posted_ns = 0, returned_ns = 0, wait_ns = 0, end_ns = 0;
  uint32_t posting_thread = 0, waiting_thread = 0;
  std::array<char, 40> name{};  // of the plan, cut; ends with a zero

  void set(const OperationTimes& times, std::string_view plan_name);
};

class OperationLog {
 public:
  struct Content {
    std::vector<OperationRecord> records;  // the oldest first
    std::vector<std::string> groups;
    uint64_t lost = 0;  // older records, for which there was no room
  };

  // The process's. It is never destroyed, because operations may end later than everything else.
  static OperationLog& shared();

  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }
  // Keeps the last `room` records from now on. Forgets what it has. Throws std::bad_alloc.
  void begin(size_t room);
  // What there is. Goes on if it is on.
  Content read() const;
  // Gives the room back.
  void end();

  // Records of this host, until another one has its address, belong to the group of this name.
  void name_group(const void* host, const std::string& name);
  // Of an operation of `host`.
  void add(const void* host, OperationRecord record) noexcept;

 private:
  std::atomic<bool> is_on_{false};
  mutable std::mutex mutex_;
  std::vector<OperationRecord> ring_;
  uint64_t added_ = 0;
  std::vector<std::string> groups_;
  std::unordered_map<const void*, uint32_t> group_of_;
};

}  // namespace sennit
