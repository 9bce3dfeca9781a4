// SPDX-License-Identifier: Apache-2.0
// Rows in memory, and the interface of their store.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace sennit::memory {

// A row of the store, and its position in `Lines`.
struct RowAt {
  std::uint64_t row = 0;
  std::uint64_t line = 0;
};

// Arrays, one for each part of a row (its weights, each state of its optimizer). Line n of all arrays is one row.
struct Lines {
  struct Part {
    std::byte* data = nullptr;
    std::size_t row_bytes = 0;
  };
  std::vector<Part> parts;

  void gather(std::uint64_t line, std::byte* out) const {
    for (const Part& part : parts) {
      std::memcpy(out, part.data + line * part.row_bytes, part.row_bytes);
      out += part.row_bytes;
    }
  }

  // Copies line `source` of others with the same parts.
  void copy(std::uint64_t line, const Lines& others, std::uint64_t source) const {
    for (std::size_t n = 0; n < parts.size(); n++) {
      const std::size_t size = parts[n].row_bytes;
      std::memcpy(parts[n].data + line * size, others.parts[n].data + source * size, size);
    }
  }

  void scatter(std::uint64_t line, const std::byte* in) const {
    for (const Part& part : parts) {
      std::memcpy(part.data + line * part.row_bytes, in, part.row_bytes);
      in += part.row_bytes;
    }
  }
};

class RowStore {
 public:
  virtual ~RowStore() = default;
  // Takes the rows `written`, each once, then reads the rows `wanted`, each once. Raises StoreError. After a
  // Fault::DEVICE or Fault::CORRUPT the store accepts no more calls.
  virtual void exchange(std::span<const RowAt> written, std::span<const RowAt> wanted, const Lines& lines) = 0;
  // Makes the last written content of all rows one generation (docs/reference/embedding-store.md), and returns its
  // number. `tag` is stored with it.
  virtual std::uint64_t flush(std::uint64_t tag) = 0;
};

}  // namespace sennit::memory
