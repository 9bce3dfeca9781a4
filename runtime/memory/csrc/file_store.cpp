// SPDX-License-Identifier: Apache-2.0
#include "file_store.hpp"

#include <cstring>

#include "store_error.hpp"

namespace sennit::memory {
namespace {

// Scratch memory of one round of reads.
constexpr std::size_t ROUND_BYTES = 16 << 20;
// For a device, reading up to this much more is cheaper than another transfer (measured: docs/performance.md).
constexpr std::size_t READ_GAP_BYTES = 8 << 10;
// The same for the page cache, which copies every byte.
constexpr std::size_t CACHED_READ_GAP_BYTES = 2 << 10;
constexpr std::size_t READ_LIMIT_BYTES = 256 << 10;
constexpr std::size_t APPLY_GAP_BYTES = 64 << 10;
constexpr std::size_t APPLY_LIMIT_BYTES = 1 << 20;
// Records taken from the log at a time. With so many, neighbours are close together in the log and are read in large
// transfers, although they are wanted in another order.
constexpr std::size_t APPLY_BYTES = 64 << 20;

}  // namespace

// After a failure in the middle of a call, the store does not know where its rows are.
template <typename Function>
auto FileStore::guarded(Function function) {
  if (!failure_.empty())
    throw StoreError(Fault::DEVICE, device_->name() + ": stopped by an earlier error, open it again: " + failure_);
  try {
    return function();
  } catch (const std::exception& error) {
    failure_ = error.what();
    throw;
  }
}

void FileStore::check(std::span<const RowAt> rows) const {
  for (const RowAt& at : rows)
    if (at.row >= block_.row_count)
      throw StoreError(Fault::ARGUMENT, device_->name() + ": row " + std::to_string(at.row) + "; allowed: below " +
                                            std::to_string(block_.row_count));
}

void FileStore::exchange(std::span<const RowAt> written, std::span<const RowAt> wanted, const Lines& lines) {
  check(written);
  check(wanted);
  guarded([&] {
    for (const RowAt& at : written) log_->append(at.row, lines, at.line);
    std::vector<Piece> pieces;
    pieces.reserve(wanted.size());
    for (const RowAt& at : wanted) {
      std::uint64_t offset = block_.base_offset + at.row * record_bytes_;
      if (log_->holds(at.row))
        if (const std::byte* record = log_->find(at.row, offset); record != nullptr) {
          lines.scatter(at.line, record);
          continue;
        }
      pieces.push_back({offset, at.row, at.line});
    }
    // Full log segments are written together with the first reads.
    std::vector<Operation> operations;
    log_->collect_writes(operations);
    read_pieces(pieces, operations,
                [&](const Piece& piece, const std::byte* record) { lines.scatter(piece.line, record); });
    log_->written();
  });
}

void FileStore::read_pieces(std::vector<Piece>& pieces, std::vector<Operation>& operations,
                            const std::function<void(const Piece&, const std::byte*)>& take) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.offset < b.offset; });
  const std::vector<Extent> extents =
      join(pieces, record_bytes_, device_->alignment_bytes(),
           device_->alignment_bytes() == 1 ? CACHED_READ_GAP_BYTES : READ_GAP_BYTES, READ_LIMIT_BYTES, true);
  std::size_t next = 0;
  do {
    std::size_t size_bytes = 0, end = next;
    while (end < extents.size() && (end == next || size_bytes + extents[end].size_bytes <= ROUND_BYTES))
      size_bytes += extents[end++].size_bytes;
    // Extents of a round may exceed the limit if records do.
    scratch_.reserve(std::max(size_bytes, end > next ? ROUND_BYTES : 0));
    std::byte* data = scratch_.data();
    for (std::size_t n = next; n < end; n++) {
      operations.push_back({Operation::Kind::READ, extents[n].offset, data, extents[n].size_bytes, 0});
      data += extents[n].size_bytes;
    }
    device_->run(operations);
    operations.clear();
    data = scratch_.data();
    for (std::size_t n = next; n < end; n++) {
      for (std::size_t p = extents[n].first; p < extents[n].last; p++) {
        const std::byte* record = data + (pieces[p].offset - extents[n].offset);
        if (!is_whole(pieces[p].row, record, payload_bytes_, record_bytes_)) refuse_record(pieces[p]);
        take(pieces[p], record);
      }
      data += extents[n].size_bytes;
    }
    next = end;
  } while (next < extents.size());
}

void FileStore::refuse_record(const Piece& piece) const {
  throw StoreError(Fault::CORRUPT, device_->name() + ": " + geometry_.name_of(piece.row) + " at offset " +
                                       std::to_string(piece.offset) + " fails its CRC");
}

std::uint64_t FileStore::flush(std::uint64_t tag) {
  return guarded([&] {
    log_->write_out();
    block_.generation++;
    block_.tag = tag;
    if (!log_->is_empty()) {
      device_->sync();
      block_.written_segments = log_->written_segments();
      block_.written_digest = log_->written_digest();
      write_superblock(Superblock::REPLAY);
      // From here on the generation survives a crash.
      apply();
    }
    write_superblock(Superblock::CLEAN);
    log_->begin(block_.incarnation, block_.generation + 1);
    return block_.generation;
  });
}

void FileStore::write_superblock(Superblock::State state) {
  block_.state = state;
  block_.sequence++;
  block_.crc = crc32c(~0u, &block_, offsetof(Superblock, crc));
  AlignedBuffer buffer(BLOCK_BYTES);
  std::memset(buffer.data(), 0, BLOCK_BYTES);
  std::memcpy(buffer.data(), &block_, sizeof block_);
  device_->write(block_.sequence % 2 * BLOCK_BYTES, buffer.span());
  device_->sync();
}

// Copies the log's rows into the base. A write torn by a power cut damages only rows that are also in the log. All
// other bytes of the block are equal before and after.
void FileStore::apply() {
  const std::size_t most_rows =
      std::min<std::size_t>(std::max<std::size_t>(APPLY_BYTES / record_bytes_, 1), log_->live_records());
  std::vector<std::byte> records(most_rows * record_bytes_);
  std::vector<Piece> in_log, in_base;
  std::vector<Operation> none;
  for (std::uint64_t row = 0; row < block_.row_count;) {
    in_log.clear();
    in_base.clear();
    for (; row < block_.row_count && in_base.size() < most_rows; row++) {
      if (!log_->holds(row)) continue;
      Piece piece{0, row, in_base.size()};
      in_base.push_back({block_.base_offset + row * record_bytes_, row, in_base.size()});
      log_->find(row, piece.offset);
      in_log.push_back(piece);
    }
    if (in_base.empty()) break;
    read_pieces(in_log, none, [&](const Piece& piece, const std::byte* record) {
      std::memcpy(records.data() + piece.line * record_bytes_, record, record_bytes_);
    });
    change_base(in_base, records);
  }
  device_->sync();
}

// Replaces records of the base, given in file order. Line n of `records` belongs to the piece with line n.
void FileStore::change_base(const std::vector<Piece>& pieces, const std::vector<std::byte>& records) {
  const std::vector<Extent> extents =
      join(pieces, record_bytes_, BLOCK_BYTES, APPLY_GAP_BYTES, APPLY_LIMIT_BYTES, false);
  std::vector<Operation> reads, writes;
  for (std::size_t next = 0; next < extents.size();) {
    std::size_t size_bytes = 0, end = next;
    while (end < extents.size() && (end == next || size_bytes + extents[end].size_bytes <= ROUND_BYTES))
      size_bytes += extents[end++].size_bytes;
    scratch_.reserve(size_bytes);
    std::byte* data = scratch_.data();
    reads.clear();
    for (std::size_t n = next; n < end; n++) {
      reads.push_back({Operation::Kind::READ, extents[n].offset, data, extents[n].size_bytes, 0});
      data += extents[n].size_bytes;
    }
    writes = reads;
    for (Operation& operation : writes) operation.kind = Operation::Kind::WRITE;
    device_->run(reads);
    for (std::size_t n = next; n < end; n++)
      for (std::size_t p = extents[n].first; p < extents[n].last; p++)
        std::memcpy(writes[n - next].data + (pieces[p].offset - extents[n].offset),
                    records.data() + pieces[p].line * record_bytes_, record_bytes_);
    device_->run(writes);
    next = end;
  }
}

// Creates and opens stores. Checks them, and repairs them after a crash.

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
