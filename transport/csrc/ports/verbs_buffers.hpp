// SPDX-License-Identifier: Apache-2.0
// Memory of the port's own that the device reads or writes: one registered slab in pieces of one size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "ports/verbs_registrations.hpp"

namespace sennit {

class VerbsBuffers {
 public:
  // Throws std::system_error.
  VerbsBuffers(VerbsRegistrations& registrations, size_t count, size_t piece_bytes)
      : piece_bytes_(piece_bytes), memory_(std::make_unique<std::byte[]>(count * piece_bytes)) {
    registration_ = registrations.acquire(memory_.get(), count * piece_bytes, true);
  }

  std::span<std::byte> operator[](size_t index) const { return {memory_.get() + index * piece_bytes_, piece_bytes_}; }
  uint32_t local_key() const { return registration_->lkey; }
  ibv_sge entry(size_t index, size_t size_bytes) const {
    return {reinterpret_cast<uintptr_t>((*this)[index].data()), static_cast<uint32_t>(size_bytes), local_key()};
  }

 private:
  const size_t piece_bytes_;
  std::unique_ptr<std::byte[]> memory_;
  ibv_mr* registration_ = nullptr;
};

}  // namespace sennit
