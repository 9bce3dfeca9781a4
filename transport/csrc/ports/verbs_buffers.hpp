// SPDX-License-Identifier: Apache-2.0
// The port's own memory that devices read or write: one slab in pieces of one size, registered with each device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ports/verbs_registrations.hpp"

namespace sennit {

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
