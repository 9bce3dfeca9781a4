// SPDX-License-Identifier: Apache-2.0
// Rows written since the last generation, appended in large writes. The base of the file keeps the rows of that
// generation.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "aligned_buffer.hpp"
#include "device.hpp"
#include "format.hpp"

namespace sennit::memory {

class SpillLog {
 public:
  // Locations are 32-bit numbers; 0 is none.
  static constexpr std::uint64_t MAX_RECORDS = 0xFFFF'FFFF;

  static std::uint64_t segment_bytes(std::size_t record_bytes);
  static std::uint64_t segment_count(std::uint64_t row_count, std::size_t record_bytes);

  SpillLog(Device& device, const Geometry& geometry, const Superblock& block);

  // Forgets everything. Rows appended from now on belong to this generation.
  void begin(std::uint64_t incarnation, std::uint64_t generation);

  // Takes the current content of a row. May write segments, and read others to make room.
  void append(std::uint64_t row, const Lines& lines, std::uint64_t line);

  bool holds(std::uint64_t row) const { return locations_[row] != 0; }
  bool is_empty() const { return live_records_ == 0; }
  std::uint64_t live_records() const { return live_records_; }
  // Where the log has the record of a row: in memory, or (null) at `offset` of the device.
  const std::byte* find(std::uint64_t row, std::uint64_t& offset) const;

  // Writes of full segments that the device still needs. All must be done before `written` is called.
  void collect_writes(std::vector<Operation>& operations);
  void written();

  // Writes everything that is not on the device yet.
  void write_out();

  // The fields of a superblock about the segments of this generation.
  std::uint64_t written_segments() const { return checksums_.size(); }
  std::uint64_t written_digest() const;

  // Finds the rows of a generation that a superblock calls complete. Raises StoreError if a segment is missing.
  void recover(const Superblock& block);

  struct Counters {
    std::uint64_t records = 0, segments = 0, records_moved = 0;
  };
  const Counters& counters() const { return counters_; }

 private:
  enum class State : std::uint8_t { FREE, OPEN, FULL, WRITTEN };
  struct Segment {
    State state = State::FREE;
    std::uint32_t live = 0;
  };

  std::byte* record(std::byte* segment, std::uint64_t slot) const {
    return segment + records_offset_ + slot * record_bytes_;
  }
  std::uint64_t offset(std::uint64_t segment) const { return log_offset_ + segment * segment_bytes_; }
  std::byte* place(std::uint64_t row);
  void open_segment();
  void close_segment();
  void drop(std::uint32_t location);
  void make_room();
  void move_out(std::uint32_t victim);

  Device& device_;
  const Geometry& geometry_;
  std::uint64_t log_offset_, segment_bytes_, capacity_, records_offset_;
  std::size_t payload_bytes_, record_bytes_;
  std::uint64_t incarnation_ = 0, generation_ = 0, sequence_ = 0, live_records_ = 0;

  std::vector<std::uint32_t> locations_;  // by row: segment · capacity + slot + 1
  std::vector<Segment> segments_;
  std::deque<std::uint32_t> free_;
  std::map<std::uint32_t, std::uint32_t> checksums_;  // by segment that is on the device

  std::uint32_t open_ = 0, open_count_ = 0;
  bool has_open_ = false;
  AlignedBuffer open_buffer_;
  std::vector<std::pair<std::uint32_t, AlignedBuffer>> full_;
  std::vector<AlignedBuffer> spare_;
  AlignedBuffer victim_buffer_;
  Counters counters_;
};

}  // namespace sennit::memory
