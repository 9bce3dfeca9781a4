// SPDX-License-Identifier: Apache-2.0
// A store with 16-bit weights for a cache with 32-bit weights: docs/reference/embedding-store.md.
#pragma once

#include <cstdint>
#include <vector>

#include "instruction_sets.hpp"
#include "rows.hpp"

namespace sennit::memory {

// The first part of a row is its weights: float32 in `Lines`, fp16 or bf16 in the store below. Other parts are equal in
// both. Weights are rounded when the store below receives the row, and nowhere else.
class NarrowStore final : public RowStore {
 public:
  // `tables`, in store order, have the dim, the precision and the keys of the random numbers (kernels/csrc/job.hpp).
  // `below` outlives this object. `number`: earlier write-backs; the next one is number + 1.
  NarrowStore(RowStore& below, std::vector<kernels::Table> tables, bool is_stochastic, std::uint64_t seed,
              std::uint64_t number);

  void exchange(std::span<const RowAt> written, std::span<const RowAt> wanted, const Lines& lines) override;
  std::uint64_t flush(std::uint64_t tag) override { return below_.flush(tag); }

 private:
  struct Place {
    const kernels::Table* table;
    std::uint32_t row;
  };
  Place place_of(std::uint64_t row) const;

  RowStore& below_;
  std::vector<kernels::Table> tables_;
  std::vector<std::uint64_t> ends_;  // for each table, in rows of the store
  const kernels::Kernels& kernels_;
  kernels::Step step_{};
  std::uint64_t number_;
  std::vector<std::vector<std::byte>> memory_;  // rows in flight, part by part
  std::vector<RowAt> written_, wanted_;
};

}  // namespace sennit::memory
