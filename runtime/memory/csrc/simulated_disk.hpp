// SPDX-License-Identifier: Apache-2.0
// A disk in memory that fails on demand: short transfers, errors, kills and power cuts. For tests.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "backend.hpp"

namespace sennit::memory {

// Thrown by a kill: the process does nothing afterwards.
struct Killed : std::runtime_error {
  Killed() : std::runtime_error("killed, as a test asked for") {}
};

class SimulatedDisk {
 public:
  static constexpr std::size_t SECTOR_BYTES = 512;

  SimulatedDisk(std::uint64_t size_bytes, std::uint64_t seed) : bytes(size_bytes), random_(seed) {}

  std::vector<std::byte> bytes;   // the content that reads see
  std::uint64_t operations = 0;   // reads, writes and syncs so far
  std::uint64_t fail_at = ~0ull;  // the operation with this number fails with `error_number`, or kills if that is 0
  int error_number = 0;
  bool gives_short_transfers = false;

  void run(Operation& operation) {
    if (operations++ == fail_at) {
      if (error_number != 0) {
        operation.result = -error_number;
        return;
      }
      if (operation.kind == Operation::Kind::WRITE) write(operation, whole_sectors(operation.size_bytes));
      is_dead_ = true;
    }
    if (is_dead_) throw Killed();
    std::size_t size = operation.size_bytes;
    if (gives_short_transfers && size > SECTOR_BYTES && random_() % 2 == 0)
      size = std::max(SECTOR_BYTES, whole_sectors(size));
    if (operation.kind == Operation::Kind::READ)
      std::memcpy(operation.data, bytes.data() + operation.offset, size);
    else
      write(operation, size);
    operation.result = static_cast<std::int64_t>(size);
  }

  int sync() {
    if (operations++ == fail_at) {
      if (error_number != 0) return error_number;
      is_dead_ = true;
    }
    if (is_dead_) throw Killed();
    unsynced_.clear();
    return 0;
  }

  // Starts the next process. Everything that the last one wrote is there.
  void start_again() {
    is_dead_ = false;
    fail_at = ~0ull;
  }

  // The same after a power cut: each sector that was not synced is either written or not.
  void cut_power() {
    for (auto write = unsynced_.rbegin(); write != unsynced_.rend(); write++)
      std::memcpy(bytes.data() + write->offset, write->before.data(), write->before.size());
    for (const Write& write : unsynced_)
      for (std::size_t n = 0; n < write.after.size(); n += SECTOR_BYTES)
        if (random_() % 2 == 0)
          std::memcpy(bytes.data() + write.offset + n, write.after.data() + n,
                      std::min(SECTOR_BYTES, write.after.size() - n));
    unsynced_.clear();
    start_again();
  }

 private:
  struct Write {
    std::uint64_t offset;
    std::vector<std::byte> before, after;
  };

  std::size_t whole_sectors(std::size_t size_bytes) {
    return random_() % (size_bytes / SECTOR_BYTES + 1) * SECTOR_BYTES;
  }

  void write(const Operation& operation, std::size_t size) {
    if (size == 0) return;
    std::byte* at = bytes.data() + operation.offset;
    unsynced_.push_back({operation.offset, {at, at + size}, {operation.data, operation.data + size}});
    std::memcpy(at, operation.data, size);
  }

  std::mt19937_64 random_;
  std::vector<Write> unsynced_;
  bool is_dead_ = false;
};

class SimulatedBackend final : public Backend {
 public:
  explicit SimulatedBackend(std::shared_ptr<SimulatedDisk> disk) : disk_(std::move(disk)) {}
  void run(std::span<Operation> operations) override {
    for (Operation& operation : operations) disk_->run(operation);
  }
  int sync() override { return disk_->sync(); }
  const char* name() const override { return "simulated"; }

 private:
  std::shared_ptr<SimulatedDisk> disk_;
};

}  // namespace sennit::memory
