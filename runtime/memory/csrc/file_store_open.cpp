// SPDX-License-Identifier: Apache-2.0
// Creates and opens stores. Checks them, and repairs them after a crash.
#include <cstring>

#include "file_store.hpp"
#include "store_error.hpp"

namespace sennit::memory {
namespace {

constexpr std::size_t BUILD_BYTES = 4 << 20;

bool read_whole(Device& device, std::uint64_t offset, Superblock& block, bool& has_magic) {
  AlignedBuffer buffer(BLOCK_BYTES);
  device.read(offset, buffer.span());
  std::memcpy(&block, buffer.data(), sizeof block);
  const bool is_ours = std::memcmp(block.magic, MAGIC, sizeof MAGIC) == 0;
  has_magic |= is_ours;
  return is_ours && block.crc == crc32c(~0u, &block, offsetof(Superblock, crc));
}

std::string describe(const Geometry::Table& table) {
  return "table '" + table.name + "' of " + std::to_string(table.row_count) + " rows";
}

std::string describe(const Geometry::Part& part) {
  return part.name + " [" + std::to_string(part.columns) + "] " + part.dtype;
}

template <typename Item>
std::string first_difference(const std::vector<Item>& found, const std::vector<Item>& expected) {
  for (std::size_t n = 0; n < std::max(found.size(), expected.size()); n++) {
    const std::string has = n < found.size() ? describe(found[n]) : "nothing";
    const std::string wanted = n < expected.size() ? describe(expected[n]) : "nothing";
    if (has != wanted) return "has " + has + " where " + wanted + " is expected";
  }
  return "";
}

}  // namespace

StoreBuilder::StoreBuilder(std::unique_ptr<Device> device, Geometry geometry)
    : device_(std::move(device)), geometry_(std::move(geometry)), block_(lay_out(geometry_)) {
  if (device_->size_bytes() < block_.end_offset())
    throw StoreError(Fault::ARGUMENT, device_->name() + ": the store takes " + std::to_string(block_.end_offset()) +
                                          " bytes, the device has " + std::to_string(device_->size_bytes()));
  // Old content of a block device must not look like a part of this store.
  AlignedBuffer zeros(2 * BLOCK_BYTES);
  std::memset(zeros.data(), 0, zeros.size_bytes());
  device_->write(0, zeros.span());
  const std::string directory = geometry_.encode();
  AlignedBuffer padded(block_.base_offset - DIRECTORY_OFFSET);
  std::memset(padded.data(), 0, padded.size_bytes());
  std::memcpy(padded.data(), directory.data(), directory.size());
  device_->write(DIRECTORY_OFFSET, padded.span());
  buffer_ = AlignedBuffer(BUILD_BYTES);
  offset_ = block_.base_offset;
}

void StoreBuilder::append(const Lines& lines, std::uint64_t count) {
  if (count > block_.row_count - rows_)
    throw StoreError(Fault::ARGUMENT, device_->name() + ": " + std::to_string(rows_ + count) +
                                          " rows; the tables have " + std::to_string(block_.row_count));
  const std::size_t payload_bytes = geometry_.payload_bytes(), record_bytes = geometry_.record_bytes();
  for (std::uint64_t line = 0; line < count; line++, rows_++) {
    if (filled_bytes_ + record_bytes > buffer_.size_bytes()) write_out(filled_bytes_ / BLOCK_BYTES * BLOCK_BYTES);
    std::byte* record = buffer_.data() + filled_bytes_;
    lines.gather(line, record);
    seal_record(rows_, record, payload_bytes, record_bytes);
    filled_bytes_ += record_bytes;
  }
}

void StoreBuilder::write_out(std::size_t size_bytes) {
  device_->write(offset_, {buffer_.data(), size_bytes});
  offset_ += size_bytes;
  filled_bytes_ -= std::min(filled_bytes_, size_bytes);
  std::memmove(buffer_.data(), buffer_.data() + size_bytes, filled_bytes_);
}

void StoreBuilder::finish() {
  if (rows_ != block_.row_count)
    throw StoreError(Fault::ARGUMENT, device_->name() + ": " + std::to_string(rows_) + " rows were given, the tables " +
                                          "have " + std::to_string(block_.row_count));
  const std::size_t size_bytes = (filled_bytes_ + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
  std::memset(buffer_.data() + filled_bytes_, 0, size_bytes - filled_bytes_);
  if (size_bytes > 0) write_out(size_bytes);
  device_->sync();
  block_.sequence = 1;
  block_.crc = crc32c(~0u, &block_, offsetof(Superblock, crc));
  AlignedBuffer buffer(BLOCK_BYTES);
  std::memset(buffer.data(), 0, BLOCK_BYTES);
  std::memcpy(buffer.data(), &block_, sizeof block_);
  device_->write(block_.sequence % 2 * BLOCK_BYTES, buffer.span());
  device_->sync();
}

FileStore::FileStore(std::unique_ptr<Device> device, const std::optional<Geometry>& expected)
    : device_(std::move(device)) {
  read_superblock(expected);
  payload_bytes_ = geometry_.payload_bytes();
  record_bytes_ = geometry_.record_bytes();
  log_ = std::make_unique<SpillLog>(*device_, geometry_, block_);
  if (block_.state == Superblock::REPLAY) {
    log_->recover(block_);
    apply();
    was_replayed_ = true;
  }
  // Segments of a generation that a crash interrupted have the old incarnation, so they never look like new ones.
  block_.incarnation++;
  write_superblock(Superblock::CLEAN);
  log_->begin(block_.incarnation, block_.generation + 1);
}

void FileStore::read_superblock(const std::optional<Geometry>& expected) {
  const std::string& name = device_->name();
  const auto foreign = [&](const std::string& what) { throw StoreError(Fault::FOREIGN, name + ": " + what); };
  if (device_->size_bytes() < DIRECTORY_OFFSET)
    foreign("of " + std::to_string(device_->size_bytes()) + " bytes, too short for an embedding store");
  Superblock blocks[2];
  bool has_magic = false;
  const bool is_first = read_whole(*device_, 0, blocks[0], has_magic);
  const bool is_second = read_whole(*device_, BLOCK_BYTES, blocks[1], has_magic);
  if (!has_magic)
    foreign("not an embedding store (no superblock at offsets 0 and 4096), or one whose making was cut short");
  if (!is_first && !is_second)
    throw StoreError(Fault::CORRUPT, name + ": both superblocks, at offsets 0 and 4096, fail their CRC");
  const bool is_newer_second = is_second && (!is_first || blocks[1].sequence > blocks[0].sequence);
  block_ = blocks[is_newer_second ? 1 : 0];
  if (block_.version != VERSION)
    foreign("version " + std::to_string(block_.version) + "; this sennit knows " + std::to_string(VERSION));
  if (block_.end_offset() > device_->size_bytes())
    throw StoreError(Fault::CORRUPT, name + ": the store ends at offset " + std::to_string(block_.end_offset()) +
                                         ", the file at " + std::to_string(device_->size_bytes()));
  if (block_.base_offset < DIRECTORY_OFFSET + block_.directory_bytes || block_.base_offset > block_.log_offset)
    throw StoreError(Fault::CORRUPT, name + ": the superblock puts the base at offset " +
                                         std::to_string(block_.base_offset) + ", inside of something else");
  AlignedBuffer directory(block_.base_offset - DIRECTORY_OFFSET);
  device_->read(DIRECTORY_OFFSET, directory.span());
  if (crc32c(~0u, directory.data(), block_.directory_bytes) != block_.directory_crc)
    throw StoreError(Fault::CORRUPT, name + ": the directory of tables at offset " + std::to_string(DIRECTORY_OFFSET) +
                                         " fails its CRC");
  geometry_ = Geometry::decode({directory.data(), block_.directory_bytes});
  if (geometry_.row_count() != block_.row_count ||
      block_.base_offset + block_.row_count * geometry_.record_bytes() > block_.log_offset)
    throw StoreError(Fault::CORRUPT, name + ": the directory of tables at offset " + std::to_string(DIRECTORY_OFFSET) +
                                         " does not fit the superblock's " + std::to_string(block_.row_count) +
                                         " rows");
  if (!expected) return;
  expected->check();
  const std::string tables = first_difference(geometry_.tables, expected->tables);
  const std::string parts = first_difference(geometry_.parts, expected->parts);
  if (!tables.empty()) foreign(tables);
  if (!parts.empty()) foreign("each row " + parts);
}

}  // namespace sennit::memory
