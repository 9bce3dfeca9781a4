// SPDX-License-Identifier: Apache-2.0
#include "spill_log.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "store_error.hpp"

namespace sennit::memory {
namespace {

constexpr std::uint32_t SEGMENT_MAGIC = 0x474F4C53;  // "SLOG"
constexpr std::uint64_t MIN_SEGMENT_BYTES = 256 << 10;
constexpr std::uint64_t MIN_SEGMENT_RECORDS = 16;
// The log has room for all rows once, and for a quarter more. So there is always a segment worth cleaning.
constexpr std::uint64_t ROOM_NUMERATOR = 5, ROOM_DENOMINATOR = 4;
// Full segments that may wait to be written together.
constexpr std::size_t MAX_FULL = 8;
// Segments kept free for records moved by cleaning, and how many are freed at once.
constexpr std::size_t RESERVE = 2, FREED_AT_ONCE = 4;

struct Header {
  std::uint32_t magic;
  std::uint32_t count;
  std::uint64_t incarnation, generation, sequence;
  std::uint32_t padding;
  std::uint32_t crc;  // of all fields before and of the row numbers after
};

std::uint64_t capacity(std::uint64_t segment_bytes, std::size_t record_bytes) {
  return (segment_bytes - sizeof(Header)) / (sizeof(std::uint64_t) + record_bytes);
}

std::uint32_t checksum(const std::byte* segment, std::uint32_t count) {
  const std::uint32_t crc = crc32c(~0u, segment, offsetof(Header, crc));
  return crc32c(crc, segment + sizeof(Header), count * sizeof(std::uint64_t));
}

// A checksum of segments that does not depend on their order. The finaliser of splitmix64 (Steele, Lea, Flood 2014).
std::uint64_t mix(std::uint64_t segment, std::uint32_t crc) {
  std::uint64_t value = (segment << 32 | crc) + 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

}  // namespace

std::uint64_t SpillLog::segment_bytes(std::size_t record_bytes) {
  return std::max(MIN_SEGMENT_BYTES,
                  std::bit_ceil(sizeof(Header) + MIN_SEGMENT_RECORDS * (sizeof(std::uint64_t) + record_bytes)));
}

std::uint64_t SpillLog::segment_count(std::uint64_t row_count, std::size_t record_bytes) {
  const std::uint64_t in_segment = capacity(segment_bytes(record_bytes), record_bytes);
  const std::uint64_t count = row_count * ROOM_NUMERATOR / ROOM_DENOMINATOR / in_segment + MAX_FULL + FREED_AT_ONCE;
  if (count * in_segment >= MAX_RECORDS)
    throw StoreError(Fault::ARGUMENT, "a store of " + std::to_string(row_count) + " rows; allowed: " +
                                          std::to_string(MAX_RECORDS * ROOM_DENOMINATOR / ROOM_NUMERATOR) +
                                          " at most: spread the tables over several stores");
  return count;
}

SpillLog::SpillLog(Device& device, const Geometry& geometry, const Superblock& block)
    : device_(device),
      geometry_(geometry),
      log_offset_(block.log_offset),
      segment_bytes_(block.segment_bytes),
      capacity_(capacity(block.segment_bytes, geometry.record_bytes())),
      records_offset_(sizeof(Header) + capacity_ * sizeof(std::uint64_t)),
      payload_bytes_(geometry.payload_bytes()),
      record_bytes_(geometry.record_bytes()),
      locations_(block.row_count),
      segments_(block.segment_count),
      open_buffer_(block.segment_bytes),
      victim_buffer_(block.segment_bytes) {}

void SpillLog::begin(std::uint64_t incarnation, std::uint64_t generation) {
  incarnation_ = incarnation;
  generation_ = generation;
  sequence_ = 0;
  live_records_ = 0;
  if (!checksums_.empty() || has_open_) std::fill(locations_.begin(), locations_.end(), 0);
  std::fill(segments_.begin(), segments_.end(), Segment{});
  checksums_.clear();
  full_.clear();
  has_open_ = false;
  free_.clear();
  for (std::uint32_t n = 0; n < segments_.size(); n++) free_.push_back(n);
}

void SpillLog::append(std::uint64_t row, const Lines& lines, std::uint64_t line) {
  std::byte* to = place(row);
  lines.gather(line, to);
  seal_record(row, to, payload_bytes_, record_bytes_);
  counters_.records++;
}

// Returns memory for the row's record in the open segment.
std::byte* SpillLog::place(std::uint64_t row) {
  const std::uint32_t old = locations_[row];
  if (old != 0 && has_open_ && (old - 1) / capacity_ == open_)
    return record(open_buffer_.data(), (old - 1) % capacity_);
  if (has_open_ && open_count_ == capacity_) close_segment();
  if (!has_open_) open_segment();
  // Cleaning may have moved the record.
  if (const std::uint32_t now = locations_[row]; now != 0) {
    if ((now - 1) / capacity_ == open_) return record(open_buffer_.data(), (now - 1) % capacity_);
    drop(now);
  }
  if (open_count_ == capacity_) {
    close_segment();
    open_segment();
  }
  const std::uint32_t slot = open_count_++;
  locations_[row] = static_cast<std::uint32_t>(open_ * capacity_ + slot + 1);
  segments_[open_].live++;
  live_records_++;
  std::memcpy(open_buffer_.data() + sizeof(Header) + slot * sizeof row, &row, sizeof row);
  return record(open_buffer_.data(), slot);
}

void SpillLog::drop(std::uint32_t location) {
  const auto number = static_cast<std::uint32_t>((location - 1) / capacity_);
  Segment& segment = segments_[number];
  live_records_--;
  if (--segment.live == 0 && segment.state == State::WRITTEN) {
    segment.state = State::FREE;
    free_.push_back(number);
  }
}

void SpillLog::open_segment() {
  if (free_.size() <= RESERVE) make_room();
  if (has_open_) return;  // cleaning has opened one
  open_ = free_.front();
  free_.pop_front();
  segments_[open_].state = State::OPEN;
  open_count_ = 0;
  has_open_ = true;
}

void SpillLog::close_segment() {
  std::byte* data = open_buffer_.data();
  Header header{SEGMENT_MAGIC, open_count_, incarnation_, generation_, sequence_++, 0, 0};
  std::memcpy(data, &header, sizeof header);
  header.crc = checksum(data, open_count_);
  std::memcpy(data, &header, sizeof header);
  // A segment that is not full is written completely, so that it holds no bytes of other owners.
  if (open_count_ < capacity_) {
    std::memset(data + sizeof(Header) + open_count_ * sizeof(std::uint64_t), 0,
                (capacity_ - open_count_) * sizeof(std::uint64_t));
    std::memset(record(data, open_count_), 0, (capacity_ - open_count_) * record_bytes_);
  }
  std::memset(record(data, capacity_), 0, segment_bytes_ - records_offset_ - capacity_ * record_bytes_);
  segments_[open_].state = State::FULL;
  checksums_[open_] = header.crc;
  full_.emplace_back(open_, std::move(open_buffer_));
  has_open_ = false;
  counters_.segments++;
  if (spare_.empty()) {
    open_buffer_ = AlignedBuffer(segment_bytes_);
  } else {
    open_buffer_ = std::move(spare_.back());
    spare_.pop_back();
  }
  if (full_.size() >= MAX_FULL) {
    std::vector<Operation> operations;
    collect_writes(operations);
    device_.run(operations);
    written();
  }
}

void SpillLog::collect_writes(std::vector<Operation>& operations) {
  for (auto& [segment, buffer] : full_)
    operations.push_back({Operation::Kind::WRITE, offset(segment), buffer.data(), segment_bytes_, 0});
}

void SpillLog::written() {
  for (auto& [number, buffer] : full_) {
    Segment& segment = segments_[number];
    segment.state = segment.live == 0 ? State::FREE : State::WRITTEN;
    if (segment.live == 0) free_.push_back(number);
    if (spare_.size() < MAX_FULL) spare_.push_back(std::move(buffer));
  }
  full_.clear();
}

void SpillLog::write_out() {
  if (has_open_) close_segment();
  std::vector<Operation> operations;
  collect_writes(operations);
  device_.run(operations);
  written();
}

// Rosenblum, Ousterhout 1992, section 3.3: clean the emptiest segments by moving their live records.
void SpillLog::make_room() {
  std::vector<Operation> operations;
  collect_writes(operations);
  device_.run(operations);
  written();
  while (free_.size() <= RESERVE + FREED_AT_ONCE) {
    std::uint32_t victim = 0;
    std::uint64_t fewest = capacity_;
    for (std::uint32_t n = 0; n < segments_.size(); n++)
      if (segments_[n].state == State::WRITTEN && segments_[n].live < fewest) {
        victim = n;
        fewest = segments_[n].live;
      }
    // While more segments are needed, the log's size ensures that there is one to clean. Otherwise enough are free.
    if (fewest == capacity_) return;
    move_out(victim);
  }
}

void SpillLog::move_out(std::uint32_t victim) {
  std::byte* data = victim_buffer_.data();
  device_.read(offset(victim), victim_buffer_.span());
  Header header;
  std::memcpy(&header, data, sizeof header);
  if (header.magic != SEGMENT_MAGIC || header.count > capacity_ || header.crc != checksums_[victim] ||
      header.crc != checksum(data, header.count))
    throw StoreError(Fault::CORRUPT, device_.name() + ": segment " + std::to_string(victim) + " of the log at offset " +
                                         std::to_string(offset(victim)) + " is not what was written there");
  for (std::uint32_t slot = 0; slot < header.count && segments_[victim].state == State::WRITTEN; slot++) {
    std::uint64_t row = 0;
    std::memcpy(&row, data + sizeof header + slot * sizeof row, sizeof row);
    if (row >= locations_.size() || locations_[row] != victim * capacity_ + slot + 1) continue;
    if (has_open_ && open_count_ == capacity_) close_segment();
    if (!has_open_) {
      open_ = free_.front();
      free_.pop_front();
      segments_[open_].state = State::OPEN;
      open_count_ = 0;
      has_open_ = true;
    }
    std::memcpy(place(row), record(data, slot), record_bytes_);
    counters_.records_moved++;
  }
}

const std::byte* SpillLog::find(std::uint64_t row, std::uint64_t& out) const {
  const std::uint64_t location = locations_[row] - 1;
  const auto number = static_cast<std::uint32_t>(location / capacity_);
  const std::uint64_t in_segment = records_offset_ + location % capacity_ * record_bytes_;
  switch (segments_[number].state) {
    case State::OPEN:
      return open_buffer_.data() + in_segment;
    case State::FULL:
      for (const auto& [segment, buffer] : full_)
        if (segment == number) return buffer.data() + in_segment;
      [[fallthrough]];
    default:
      out = offset(number) + in_segment;
      return nullptr;
  }
}

std::uint64_t SpillLog::written_digest() const {
  std::uint64_t sum = 0;
  for (const auto& [segment, crc] : checksums_) sum += mix(segment, crc);
  return sum;
}

void SpillLog::recover(const Superblock& block) {
  begin(block.incarnation, block.generation);
  std::vector<std::uint64_t> newest(locations_.size());  // sequence + 1 of the segment that `locations_` points to
  std::uint64_t first_bad = 0;
  bool has_bad = false;
  for (std::uint32_t n = 0; n < segments_.size(); n++) {
    std::byte* data = victim_buffer_.data();
    device_.read(offset(n),
                 {data, std::min(segment_bytes_, (records_offset_ + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES)});
    Header header;
    std::memcpy(&header, data, sizeof header);
    if (header.magic != SEGMENT_MAGIC || header.incarnation != incarnation_ || header.generation != generation_ ||
        header.count > capacity_ || header.crc != checksum(data, header.count)) {
      if (!has_bad) first_bad = n;
      has_bad = true;
      continue;
    }
    checksums_[n] = header.crc;
    for (std::uint32_t slot = 0; slot < header.count; slot++) {
      std::uint64_t row = 0;
      std::memcpy(&row, data + sizeof header + slot * sizeof row, sizeof row);
      if (row >= locations_.size() || newest[row] > header.sequence) continue;
      newest[row] = header.sequence + 1;
      if (locations_[row] == 0) live_records_++;
      locations_[row] = static_cast<std::uint32_t>(n * capacity_ + slot + 1);
    }
    segments_[n].state = State::WRITTEN;
  }
  if (written_segments() != block.written_segments || written_digest() != block.written_digest)
    throw StoreError(Fault::CORRUPT,
                     device_.name() + ": generation " + std::to_string(block.generation) +
                         " was complete, but of its " + std::to_string(block.written_segments) +
                         " segments of the log " + std::to_string(written_segments()) + " are there" +
                         (has_bad ? "; the first that is not is at offset " + std::to_string(offset(first_bad)) : ""));
}

}  // namespace sennit::memory
