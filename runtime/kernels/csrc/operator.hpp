// SPDX-License-Identifier: Apache-2.0
// The operator over all blocks of a batch: splits it by table, keeps scratch memory between calls.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "job.hpp"

namespace sennit::kernels {

// Grows, never shrinks; 64-byte aligned.
class Scratch {
 public:
  void* reserve(std::size_t bytes);
  std::size_t size_bytes() const { return size_bytes_; }

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t size_bytes_ = 0;
};

struct BadTable {
  std::uint32_t table;
  std::uint64_t row_count;
  std::uint32_t first_row;
};

// Batches are checked by the caller: lengths count the values, ids are below their table's row_count.
class Operator {
 public:
  Operator(const Kernels& kernels, Optimizer optimizer) : kernels_(kernels), optimizer_(optimizer) {}

  void add(const Table& table) { tables_.push_back(table); }
  std::size_t table_count() const { return tables_.size(); }
  const char* instruction_set() const { return kernels_.name; }

  // Splits a batch. `tables` and `bags` have an entry a block.
  std::vector<Block> blocks(const Batch& batch, const std::vector<std::uint32_t>& tables,
                            const std::vector<std::size_t>& bags) const;

  void lookup(const Batch& batch, const std::vector<Block>& blocks, float* output) const;
  void weight_gradient(const Batch& batch, const std::vector<Block>& blocks, const float* gradient,
                       float* result) const;
  std::vector<BadTable> update(const Batch& batch, const std::vector<Block>& blocks, const float* gradient,
                               const Step& step);

  // Memory beside tables and batch that updates have needed so far.
  std::size_t scratch_bytes() const {
    return entries_.size_bytes() + others_.size_bytes() + bags_.size_bytes() + owners_.size_bytes() +
           sums_.size_bytes();
  }

 private:
  BadRows update_table(const Batch& batch, const std::vector<Block>& own, const float* gradient, const Step& step);

  const Kernels& kernels_;
  Optimizer optimizer_;
  std::vector<Table> tables_;
  Scratch entries_, others_, bags_, owners_, sums_;
};

}  // namespace sennit::kernels
