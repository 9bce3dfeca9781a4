// SPDX-License-Identifier: Apache-2.0
// Memory that the device may reach, registered as few times as is safe.
//
// A registration holds the pages that were there when it was made. If the memory is unmapped and the address reused,
// the device would silently read and write the old pages. So a registration lives only as long as somebody guarantees
// the mapping: an operation for its buffers, the user for memory that serves many operations (borrow, give_back), a
// message for its own range. Meanwhile a request for any part of a buffer registers the whole buffer, once. At the
// limit of locked memory, the least recently used registration goes first (docs/decisions/0033).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ports/verbs/verbs_device.hpp"
#include "trace/tracepoints.hpp"

namespace sennit {

class VerbsRegistrations {
 public:
  // `access` for memory that is written: IBV_ACCESS_*. Memory that cannot be written is registered for reading.
  // `rank`: for tracepoints.
  VerbsRegistrations(uint32_t rank, const VerbsDevice& device, int access)
      : rank_(rank), device_(device), access_(access) {}
  ~VerbsRegistrations();
  VerbsRegistrations(const VerbsRegistrations&) = delete;
  VerbsRegistrations& operator=(const VerbsRegistrations&) = delete;

  // The memory stays mapped in place until as many calls of give_back(). Nothing is registered yet.
  void borrow(const void* address, size_t size_bytes);
  void give_back(const void* address, size_t size_bytes);

  // Returns a registration that covers the range, until release(). Throws std::system_error with what to do.
  ibv_mr* acquire(const std::byte* address, size_t size_bytes, bool is_written);
  void release(ibv_mr* region);
  // At the limit: drops the least recently used registration without users. False: there is none.
  bool evict();

  uint32_t rank() const { return rank_; }
  uint64_t registered_bytes() const { return registered_bytes_; }
  uint64_t registrations() const { return registrations_; }  // made since the start
  uint64_t hits() const { return hits_; }                    // acquired without making one
  uint64_t evictions() const { return evictions_; }

 private:
  struct Range {
    uintptr_t begin, end;
    bool covers(uintptr_t from, uintptr_t to) const { return begin <= from && to <= end; }
  };
  struct Borrowed {
    Range range;
    uint32_t count;
  };
  struct Entry {
    Range range;
    VerbsHandle<ibv_mr> region;
    uint32_t users;
    bool is_writable;
    bool is_kept;   // lies in borrowed memory: stays without users
    uint64_t used;  // time of the last use, by acquisitions_
  };

  Entry make(Range range, bool is_written);
  ibv_mr* register_range(const Range& range, int access);
  void drop(size_t index);
  void note(trace::Registration what, const Entry& entry) const;
  bool is_borrowed(const Range& range) const;

  const uint32_t rank_;
  const VerbsDevice& device_;
  const int access_;
  std::vector<Borrowed> borrowed_;  // a handful: the buffers of the operations in flight
  std::vector<Entry> entries_;      // likewise
  uint64_t registered_bytes_ = 0, registrations_ = 0, hits_ = 0, evictions_ = 0, acquisitions_ = 0;
};

// The port's own memory that devices read or write: one slab in pieces of one size, registered with each device.
class VerbsBuffers {
 public:
  VerbsBuffers(size_t count, size_t piece_bytes)
      : count_(count), piece_bytes_(piece_bytes), memory_(std::make_unique<std::byte[]>(count * piece_bytes)) {}

  // Registers with the next device. Devices are numbered in the order of these calls. Throws std::system_error.
  void register_with(VerbsRegistrations& registrations) {
    local_keys_.push_back(registrations.acquire(memory_.get(), count_ * piece_bytes_, true)->lkey);
  }
  size_t count() const { return count_; }
  std::span<std::byte> operator[](size_t index) const { return {memory_.get() + index * piece_bytes_, piece_bytes_}; }
  ibv_sge entry(size_t index, size_t size_bytes, size_t device = 0) const {
    return {reinterpret_cast<uintptr_t>((*this)[index].data()), static_cast<uint32_t>(size_bytes), local_keys_[device]};
  }

 private:
  const size_t count_, piece_bytes_;
  std::unique_ptr<std::byte[]> memory_;
  std::vector<uint32_t> local_keys_;
};

}  // namespace sennit
