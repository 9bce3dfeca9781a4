// SPDX-License-Identifier: Apache-2.0
#include "operator.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "sort.hpp"

namespace sennit::kernels {

void* Scratch::reserve(std::size_t bytes) {
  if (bytes > size_bytes_) {
    constexpr std::size_t alignment = 64;
    const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    memory_.reset();
    size_bytes_ = 0;
    memory_.reset(std::aligned_alloc(alignment, rounded));
    if (!memory_) throw std::bad_alloc();
    size_bytes_ = rounded;
  }
  return memory_.get();
}

void Scratch::Free::operator()(void* memory) const { std::free(memory); }

std::vector<Block> Operator::blocks(const Batch& batch, const std::vector<std::uint32_t>& tables,
                                    const std::vector<std::size_t>& bags) const {
  std::vector<Block> found;
  found.reserve(tables.size());
  Block next{};
  for (std::size_t n = 0; n < tables.size(); n++) {
    next.table = tables[n];
    next.bag_count = bags[n];
    next.lookup_count = 0;
    for (std::size_t bag = 0; bag < bags[n]; bag++) next.lookup_count += batch.lengths[next.first_bag + bag];
    found.push_back(next);
    const std::size_t vectors = batch.pooling == Pooling::none ? next.lookup_count : next.bag_count;
    next.first_output += vectors * tables_[next.table].dim;
    next.first_bag += next.bag_count;
    next.first_lookup += next.lookup_count;
  }
  return found;
}

void Operator::lookup(const Batch& batch, const std::vector<Block>& blocks, float* output) const {
  for (const Block& block : blocks) kernels_.lookup(tables_[block.table], batch, block, output + block.first_output);
}

void Operator::weight_gradient(const Batch& batch, const std::vector<Block>& blocks, const float* gradient,
                               float* result) const {
  for (const Block& block : blocks)
    kernels_.weight_gradient(tables_[block.table], batch, block, gradient + block.first_output,
                             result + block.first_lookup);
}

std::vector<BadTable> Operator::update(const Batch& batch, const std::vector<Block>& blocks, const float* gradient,
                                       const Step& step) {
  std::vector<BadTable> bad;
  std::vector<std::vector<Block>> of_table(tables_.size());
  for (const Block& block : blocks)
    if (block.lookup_count != 0) of_table[block.table].push_back(block);
  for (std::uint32_t table = 0; table < tables_.size(); table++) {
    if (of_table[table].empty()) continue;
    const BadRows rows = update_table(batch, of_table[table], gradient, step);
    if (rows.count != 0) bad.push_back({table, rows.count, rows.first});
  }
  return bad;
}

// Keys are numbers of vectors of the gradient within the batch: bags, or lookups of sequences; with weights they are
// lookups, and a list says which bag each is in.
BadRows Operator::update_table(const Batch& batch, const std::vector<Block>& own, const float* gradient,
                               const Step& step) {
  const Table& table = tables_[own.front().table];
  const bool is_sequence = batch.pooling == Pooling::none;
  const auto first_vector = [&](const Block& block) { return is_sequence ? block.first_lookup : block.first_bag; };
  const auto vector_count = [&](const Block& block) { return is_sequence ? block.lookup_count : block.bag_count; };

  std::size_t lookups = 0;
  std::vector<std::int64_t> shifts;
  for (const Block& block : own) {
    lookups += block.lookup_count;
    shifts.push_back(static_cast<std::int64_t>(block.first_output) -
                     static_cast<std::int64_t>(first_vector(block) * table.dim));
  }
  Gradients gradients{};
  gradients.gradient = gradient;
  gradients.dim = table.dim;
  gradients.shifts = shifts.data();
  gradients.weights = batch.weights;
  if (batch.pooling == Pooling::mean) gradients.lengths = batch.lengths;
  gradients.first_vector = first_vector(own.front());
  gradients.first_lookup = own.front().first_lookup;
  if (own.size() > 1) {
    const std::size_t span = first_vector(own.back()) + vector_count(own.back()) - gradients.first_vector;
    auto* owners = static_cast<std::uint32_t*>(owners_.reserve(span * sizeof(std::uint32_t)));
    for (std::uint32_t n = 0; n < own.size(); n++)
      std::fill_n(owners + (first_vector(own[n]) - gradients.first_vector), vector_count(own[n]), n);
    gradients.block_of = owners;
  }
  if (batch.weights != nullptr) {
    const std::size_t span = own.back().first_lookup + own.back().lookup_count - gradients.first_lookup;
    auto* bags = static_cast<std::uint32_t*>(bags_.reserve(span * sizeof(std::uint32_t)));
    for (const Block& block : own) {
      std::uint32_t* to = bags + (block.first_lookup - gradients.first_lookup);
      for (std::size_t bag = block.first_bag; bag < block.first_bag + block.bag_count; bag++)
        to = std::fill_n(to, batch.lengths[bag], static_cast<std::uint32_t>(bag));
    }
    gradients.bag_of_lookup = bags;
  }

  const bool keys_are_lookups = is_sequence || batch.weights != nullptr;
  const auto each = [&](auto take) {
    for (const Block& block : own) {
      std::size_t lookup = block.first_lookup;
      for (std::size_t bag = block.first_bag; bag < block.first_bag + block.bag_count; bag++)
        for (const std::size_t end = lookup + batch.lengths[bag]; lookup < end; lookup++)
          if (const std::int64_t id = batch.values[lookup]; id >= 0)
            take(static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(keys_are_lookups ? lookup : bag));
    }
  };
  RowSort sort(table.row_count);
  auto* one = static_cast<Entry*>(entries_.reserve(lookups * sizeof(Entry)));
  auto* other = sort.buffer_count() == 1 ? nullptr : static_cast<Entry*>(others_.reserve(lookups * sizeof(Entry)));
  const std::span<const Entry> sorted = sort(each, one, other);

  const std::size_t sum_bytes = (level_count(sorted.size()) + 1) * sum_stride(table.dim) * sizeof(float);
  auto* sums = static_cast<float*>(sums_.reserve(sum_bytes));
  return kernels_.update({&table, optimizer_, &step, sorted.data(), sorted.size(), gradients, sums});
}

}  // namespace sennit::kernels
