// SPDX-License-Identifier: Apache-2.0
#include "executor/operation_log.hpp"

#include <time.h>
#include <unistd.h>

#include <algorithm>

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

void OperationLog::begin(size_t room) {
  std::vector<OperationRecord> ring(std::max<size_t>(room, 1));
  const std::lock_guard<std::mutex> lock(mutex_);
  ring_ = std::move(ring);
  added_ = 0;
  is_on_.store(true, std::memory_order_relaxed);
}

OperationLog::Content OperationLog::read() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Content content;
  content.groups = groups_;
  const uint64_t kept = std::min<uint64_t>(added_, ring_.size());
  content.lost = added_ - kept;
  content.records.reserve(kept);
  for (uint64_t i = content.lost; i < added_; ++i) content.records.push_back(ring_[i % ring_.size()]);
  return content;
}

void OperationLog::end() {
  std::vector<OperationRecord> ring;
  const std::lock_guard<std::mutex> lock(mutex_);
  is_on_.store(false, std::memory_order_relaxed);
  ring_.swap(ring);
  added_ = 0;
}

void OperationLog::name_group(const void* host, const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  groups_.push_back(name);
  group_of_[host] = static_cast<uint32_t>(groups_.size() - 1);
}

void OperationLog::add(const void* host, OperationRecord record) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ring_.empty()) return;
  if (const auto found = group_of_.find(host); found != group_of_.end()) record.group = found->second;
  ring_[added_++ % ring_.size()] = record;
}

}  // namespace sennit
