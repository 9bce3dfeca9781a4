// SPDX-License-Identifier: Apache-2.0
// Rows in a file or block device, in generations that survive a kill and a power cut:
// docs/reference/embedding-store.md.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "device.hpp"
#include "extents.hpp"
#include "format.hpp"
#include "rows.hpp"
#include "spill_log.hpp"

namespace sennit::memory {

// Fills a new file with its rows, in order. Until `finish` the file is not a store.
class StoreBuilder {
 public:
  StoreBuilder(std::unique_ptr<Device> device, Geometry geometry);

  static std::uint64_t size_bytes(const Geometry& geometry) { return lay_out(geometry).end_offset(); }

  // The next `count` rows.
  void append(const Lines& lines, std::uint64_t count);
  // Makes it generation 0 of a store. Raises StoreError if rows are missing.
  void finish();

 private:
  void write_out(std::size_t size_bytes);

  std::unique_ptr<Device> device_;
  Geometry geometry_;
  Superblock block_;
  AlignedBuffer buffer_;
  std::size_t filled_bytes_ = 0;
  std::uint64_t rows_ = 0, offset_ = 0;
};

class FileStore final : public RowStore {
 public:
  // Brings the file to its last complete generation. With `expected`, raises StoreError if tables or parts differ.
  explicit FileStore(std::unique_ptr<Device> device, const std::optional<Geometry>& expected = std::nullopt);

  void exchange(std::span<const RowAt> written, std::span<const RowAt> wanted, const Lines& lines) override;
  std::uint64_t flush(std::uint64_t tag) override;

  const Geometry& geometry() const { return geometry_; }
  const Device& device() const { return *device_; }
  const SpillLog& log() const { return *log_; }
  std::uint64_t generation() const { return block_.generation; }
  std::uint64_t tag() const { return block_.tag; }
  // Whether a crash left a complete generation, which opening moved into the base.
  bool was_replayed() const { return was_replayed_; }

 private:
  template <typename Function>
  auto guarded(Function function);
  void check(std::span<const RowAt> rows) const;
  void read_superblock(const std::optional<Geometry>& expected);
  void write_superblock(Superblock::State state);
  void read_pieces(std::vector<Piece>& pieces, std::vector<Operation>& operations,
                   const std::function<void(const Piece&, const std::byte*)>& take);
  void apply();
  void change_base(const std::vector<Piece>& pieces, const std::vector<std::byte>& records);
  [[noreturn]] void refuse_record(const Piece& piece) const;

  std::unique_ptr<Device> device_;
  Geometry geometry_;
  Superblock block_{};
  std::unique_ptr<SpillLog> log_;
  std::size_t payload_bytes_ = 0, record_bytes_ = 0;
  AlignedBuffer scratch_;
  bool was_replayed_ = false;
  std::string failure_;
};

}  // namespace sennit::memory
