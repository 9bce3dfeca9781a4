// SPDX-License-Identifier: Apache-2.0
// The operator over all blocks of a batch. It splits the batch by table, and keeps scratch memory between calls.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "job.hpp"

namespace sennit::kernels {

// A buffer that grows and never shrinks; 64-byte aligned.
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

// Where the sums of a table's rows go.
struct RowSums {
  std::int64_t* rows;  // [count], rising.
  float* sums;         // [count, dim].
};

// Makes room for the sums of `count` rows of a table.
using MakeRoom = std::function<RowSums(std::uint32_t table, std::size_t count)>;

struct BadTable {
  std::uint32_t table;
  std::uint64_t row_count;
  std::uint32_t first_row;
};

// Whether all lengths are at least 0 and add up to `value_count`, and all ids are in [0, row_count) of their table.
bool is_sound(const Batch& batch, const std::vector<std::uint64_t>& row_counts, const std::vector<std::size_t>& bags,
              std::size_t value_count);

// The caller has checked the batch: lengths add up to the number of values, ids are below their table's row_count.
//
// With several threads, tables are sorted in parallel and then updated in pieces: whole rows, or subtrees of a row's
// run. So results do not depend on the number of threads.
class Operator {
 public:
  Operator(const Kernels& kernels, Optimizer optimizer, unsigned threads = 1)
      : kernels_(kernels), optimizer_(optimizer), threads_(threads) {}

  void add(const Table& table) { tables_.push_back(table); }
  const char* instruction_set() const { return kernels_.name; }

  // Splits a batch. `tables` and `bags` have one entry per block.
  std::vector<Block> blocks(const Batch& batch, const std::vector<std::uint32_t>& tables,
                            const std::vector<std::size_t>& bags) const;

  void lookup(const Batch& batch, const std::vector<Block>& blocks, float* output) const;
  void weight_gradient(const Batch& batch, const std::vector<Block>& blocks, const float* gradient,
                       float* result) const;
  std::vector<BadTable> update(const Batch& batch, const std::vector<Block>& blocks, const float* gradient,
                               const Step& step);
  // For an operator with `Optimizer::none`. `make_room` is called once for each table with lookups, in their order.
  void sum_rows(const Batch& batch, const std::vector<Block>& blocks, const float* gradient, const MakeRoom& make_room);

  // Bytes that updates have needed so far, without tables and batch.
  std::size_t scratch_bytes() const {
    return entries_.size_bytes() + others_.size_bytes() + bags_.size_bytes() + owners_.size_bytes() +
           sums_.size_bytes();
  }

 private:
  struct Call {
    const Batch& batch;
    const std::vector<Block>& blocks;
    const Step& step;
    Gradients gradients;        // Including the shifts of all blocks.
    const MakeRoom& make_room;  // For `Optimizer::none`.
  };
  // A table that a call updates, and its blocks.
  struct Part {
    const Table* table;
    std::uint32_t number;
    std::vector<std::size_t> blocks;
    std::size_t lookup_count = 0;
    Gradients gradients{};
    std::span<const Entry> sorted{};
    BadRows bad{};
    RowSums sums{};
  };
  // Entries that a worker takes at a time: whole rows, or a node of the tree of one row, whose sum goes to `sum`.
  struct Piece {
    Part* part;
    std::span<const Entry> entries;
    std::uint64_t leaf = 0;  // The first one of the node.
    float* sum = nullptr;
    std::size_t first_row = 0;  // Rows of the table before it; for `Optimizer::none`.
    BadRows bad{};
  };
  // A run spread over several pieces.
  struct CutRun {
    std::size_t first_piece, piece_count;
  };

  std::vector<Block> pieces_of(const Batch& batch, const std::vector<Block>& blocks) const;
  unsigned workers_for(std::size_t lookups) const;
  std::vector<BadTable> run(const Batch& batch, const std::vector<Block>& blocks, const float* gradient,
                            const Step& step, const MakeRoom& make_room);
  void take_turn(const Call& call, std::span<Part> parts);
  static Gradients gradients_of(const Call& call, const Part& part);
  std::span<const Entry> sort(const Call& call, const Part& part, Entry* one, Entry* other) const;
  void cut(Part& part, std::vector<Piece>& pieces, std::vector<CutRun>& runs) const;
  static void cut_run(Part& part, std::span<const Entry> run, std::size_t level, std::vector<Piece>& pieces);
  static void count_rows(std::span<Piece> pieces, const MakeRoom& make_room);
  RowUpdate job(const Call& call, const Piece& piece, float* sums) const;

  const Kernels& kernels_;
  Optimizer optimizer_;
  unsigned threads_;
  std::vector<Table> tables_;
  Scratch entries_, others_, bags_, owners_, sums_;
};

}  // namespace sennit::kernels
