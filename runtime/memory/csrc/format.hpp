// SPDX-License-Identifier: Apache-2.0
// The bytes of a store's file: docs/reference/embedding-store.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "rows.hpp"

namespace sennit::memory {

inline constexpr std::uint64_t BLOCK_BYTES = 4096;

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size_bytes);

struct Geometry {
  struct Table {
    std::string name;
    std::uint64_t row_count = 0;
  };
  // Bytes of each part of a row, one after another.
  struct Part {
    std::string name, dtype;
    std::uint32_t columns = 0, row_bytes = 0;
  };
  std::vector<Table> tables;
  std::vector<Part> parts;

  std::uint64_t row_count() const;
  std::size_t payload_bytes() const;
  // With the CRC.
  std::size_t record_bytes() const { return (payload_bytes() + 3) / 4 * 4 + 4; }
  // "table 'a' row 3"
  std::string name_of(std::uint64_t row) const;

  // Raises StoreError for names, sizes or numbers that a file cannot hold.
  void check() const;
  std::string encode() const;
  // Raises std::out_of_range for bytes that `encode` did not write.
  static Geometry decode(std::span<const std::byte> bytes);
};

// CRC of a row's record over its number and payload, so that a record in the wrong place fails.
std::uint32_t record_crc(std::uint64_t row, const std::byte* payload, std::size_t payload_bytes);
void seal_record(std::uint64_t row, std::byte* record, std::size_t payload_bytes, std::size_t record_bytes);
bool is_whole(std::uint64_t row, const std::byte* record, std::size_t payload_bytes, std::size_t record_bytes);

// The layout of the file, and the last complete generation. Written alternately to the first two blocks of the file.
struct Superblock {
  enum State : std::uint32_t { CLEAN = 0, REPLAY = 1 };

  char magic[8];
  std::uint32_t version;
  std::uint32_t state;
  std::uint64_t sequence;     // of superblocks: if two are valid, the higher one counts
  std::uint64_t generation;   // the last complete one
  std::uint64_t tag;          // the caller's tag for it
  std::uint64_t incarnation;  // how often the store was opened for writing
  std::uint64_t row_count;
  std::uint64_t base_offset;
  std::uint64_t log_offset;
  std::uint64_t segment_bytes;
  std::uint64_t segment_count;
  std::uint64_t directory_bytes;
  std::uint64_t written_segments;  // REPLAY: log segments of the generation,
  std::uint64_t written_digest;    // and a checksum over them
  std::uint32_t directory_crc;
  std::uint32_t crc;  // of all fields before

  std::uint64_t end_offset() const { return log_offset + segment_bytes * segment_count; }
};

inline constexpr char MAGIC[8] = {'S', 'E', 'N', 'N', 'I', 'T', 'R', 'S'};
inline constexpr std::uint32_t VERSION = 1;
inline constexpr std::uint64_t DIRECTORY_OFFSET = 2 * BLOCK_BYTES;

// For a new store with this geometry; generation 0.
Superblock lay_out(const Geometry& geometry);

}  // namespace sennit::memory
