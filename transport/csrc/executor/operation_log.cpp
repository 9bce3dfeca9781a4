// SPDX-License-Identifier: Apache-2.0
#include "executor/operation_log.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace sennit {

uint64_t clock_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

void OperationTimes::note_post() {
  posting_thread = static_cast<uint32_t>(gettid());
  posted_ns = clock_ns();
}

void OperationTimes::note_wait() {
  uint64_t none = 0;
  if (wait_ns.load(std::memory_order_relaxed) != 0 || !wait_ns.compare_exchange_strong(none, clock_ns())) return;
  waiting_thread = static_cast<uint32_t>(gettid());
}

void OperationRecord::set(const OperationTimes& times, std::string_view plan_name) {
  posted_ns = times.posted_ns;
  returned_ns = times.returned_ns;
  wait_ns = times.wait_ns.load(std::memory_order_relaxed);
  end_ns = times.end_ns;
  posting_thread = times.posting_thread;
  waiting_thread = times.waiting_thread;
  plan_name.copy(name.data(), name.size() - 1);
}

OperationLog& OperationLog::shared() {
  static auto* const log = new OperationLog;
  return *log;
}

void OperationLog::begin(int fd, uint64_t offset, size_t room) {
  struct stat file {};
  if (fstat(fd, &file) != 0) throw std::system_error(errno, std::generic_category(), "log of operations");
  const uint64_t size_bytes = room * sizeof(OperationRecord);
  if (room == 0 || offset + size_bytes > static_cast<uint64_t>(file.st_size))
    throw std::invalid_argument("log of operations: a file of " + std::to_string(file.st_size) + " bytes for " +
                                std::to_string(room) + " records from " + std::to_string(offset));
  // The pages are there when an operation ends: finding one takes longer than writing the record.
  void* const memory =
      mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "log of operations");
  end();
  const std::lock_guard<std::mutex> lock(mutex_);
  ring_ = static_cast<OperationRecord*>(memory);
  room_ = room;
  added_ = 0;
  is_on_.store(true, std::memory_order_relaxed);
}

void OperationLog::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_on_.store(false, std::memory_order_relaxed);
  if (ring_ != nullptr) munmap(ring_, room_ * sizeof(OperationRecord));
  ring_ = nullptr;
}

void OperationLog::name_group(const void* host, std::string_view name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::array<char, 48>& kept = group_of_[host];
  kept = {};
  name.copy(kept.data(), kept.size() - 1);
}

void OperationLog::add(const void* host, OperationRecord record) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ring_ == nullptr) return;
  if (const auto found = group_of_.find(host); found != group_of_.end()) record.group = found->second;
  // A kill leaves what the processor has stored so far, in this order: the number says that the rest is there.
  OperationRecord& place = ring_[added_ % room_];
  std::atomic_ref<uint64_t> number(place.number);
  number.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  record.number = 0;
  place = record;
  number.store(++added_, std::memory_order_release);
}

}  // namespace sennit
