// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "format.hpp"
#include "rows.hpp"
#include "store_error.hpp"

namespace sennit::memory {

// Rows in this process's memory, under a cache in device memory or on huge pages. Nothing survives the process.
class DramStore final : public RowStore {
 public:
  // `rows` has a line for each row and outlives the store.
  DramStore(Lines rows, std::uint64_t row_count) : rows_(std::move(rows)), row_count_(row_count) {}

  void exchange(std::span<const RowAt> written, std::span<const RowAt> wanted, const Lines& lines) override {
    for (const auto rows : {written, wanted})
      for (const RowAt& at : rows)
        if (at.row >= row_count_)
          throw StoreError(Fault::ARGUMENT,
                           "row " + std::to_string(at.row) + "; allowed: below " + std::to_string(row_count_));
    for (const RowAt& at : written) rows_.copy(at.row, lines, at.line);
    for (const RowAt& at : wanted) lines.copy(at.line, rows_, at.row);
  }

  std::uint64_t flush(std::uint64_t) override { return ++generation_; }

 private:
  Lines rows_;
  std::uint64_t row_count_;
  std::uint64_t generation_ = 0;
};

}  // namespace sennit::memory
