// SPDX-License-Identifier: Apache-2.0
#include "device.hpp"

#include <cerrno>
#include <cstring>
#include <utility>

#include "store_error.hpp"

namespace sennit::memory {
namespace {

std::string place(const std::string& name, const Operation& operation) {
  const char* verb = operation.kind == Operation::Kind::READ ? "reading " : "writing ";
  return name + ": " + verb + std::to_string(operation.size_bytes) + " bytes at offset " +
         std::to_string(operation.offset);
}

}  // namespace

Device::Device(std::unique_ptr<Backend> backend, std::string name, std::uint64_t size_bytes,
               std::size_t alignment_bytes)
    : backend_(std::move(backend)),
      name_(std::move(name)),
      size_bytes_(size_bytes),
      alignment_bytes_(alignment_bytes) {}

void Device::run(std::span<Operation> operations) {
  std::vector<Operation> rest;
  for (const Operation& operation : operations) {
    const bool is_read = operation.kind == Operation::Kind::READ;
    (is_read ? counters_.reads : counters_.writes)++;
    (is_read ? counters_.bytes_read : counters_.bytes_written) += operation.size_bytes;
    if (operation.offset > size_bytes_ || operation.size_bytes > size_bytes_ - operation.offset)
      throw StoreError(Fault::CORRUPT,
                       place(name_, operation) + ": the file has " + std::to_string(size_bytes_) + " bytes");
  }
  while (!operations.empty()) {
    backend_->run(operations);
    std::vector<Operation> again;
    for (Operation& operation : operations) {
      if (operation.result == -EINTR || operation.result == -EAGAIN) {
        again.push_back(operation);
        continue;
      }
      if (operation.result < 0) {
        const int error_number = static_cast<int>(-operation.result);
        throw StoreError(Fault::DEVICE, place(name_, operation) + ": " + std::strerror(error_number), error_number);
      }
      const auto moved = static_cast<std::size_t>(operation.result);
      if (moved >= operation.size_bytes) continue;
      // Direct I/O can only continue at an aligned offset, so the bytes behind the last one are moved again.
      const std::size_t kept = moved & ~(alignment_bytes_ - 1);
      if (kept == 0)
        throw StoreError(Fault::DEVICE,
                         place(name_, operation) + ": the device moved " + std::to_string(moved) + " bytes", EIO);
      counters_.short_transfers++;
      operation.offset += kept;
      operation.data += kept;
      operation.size_bytes -= kept;
      again.push_back(operation);
    }
    rest = std::move(again);
    operations = rest;
  }
}

void Device::read(std::uint64_t offset, std::span<std::byte> data) {
  Operation operation{Operation::Kind::READ, offset, data.data(), data.size(), 0};
  run({&operation, 1});
}

void Device::write(std::uint64_t offset, std::span<std::byte> data) {
  Operation operation{Operation::Kind::WRITE, offset, data.data(), data.size(), 0};
  run({&operation, 1});
}

void Device::sync() {
  counters_.syncs++;
  if (const int error_number = backend_->sync(); error_number != 0)
    throw StoreError(Fault::DEVICE, name_ + ": flushing to stable storage: " + std::strerror(error_number),
                     error_number);
}

}  // namespace sennit::memory
