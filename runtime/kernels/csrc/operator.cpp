// SPDX-License-Identifier: Apache-2.0
#include "operator.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "instruction_sets.hpp"
#include "parallel.hpp"
#include "sort.hpp"

namespace sennit::kernels {

namespace {

// Lookups that one of several workers takes at a time: a subtree of a long run.
constexpr std::size_t piece_lookups = chunk_lookups << 7;

std::size_t lookups_of(const std::vector<Block>& blocks) {
  return blocks.empty() ? 0 : blocks.back().first_lookup + blocks.back().lookup_count;
}

}  // namespace

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

bool is_sound(const Batch& batch, const std::vector<std::uint64_t>& row_counts, const std::vector<std::size_t>& bags,
              std::size_t value_count) {
  const Kernels& kernels = *available_kernels().front();
  std::size_t bag = 0, first = 0;
  for (std::size_t n = 0; n < row_counts.size(); n++) {
    const std::size_t start = first;
    for (const std::size_t end = bag + bags[n]; bag < end; bag++) {
      // As an unsigned number, a negative length is too large as well.
      const auto length = static_cast<std::uint64_t>(batch.lengths[bag]);
      if (length > value_count - first) return false;
      first += length;
    }
    if (!kernels.in_range(batch.values, start, first - start, row_counts[n])) return false;
  }
  return first == value_count;
}

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

unsigned Operator::workers_for(std::size_t lookups) const {
  return static_cast<unsigned>(std::min<std::size_t>(threads_, 1 + lookups / piece_lookups));
}

// For one thread, the blocks as they are; for several, blocks are cut between bags.
std::vector<Block> Operator::pieces_of(const Batch& batch, const std::vector<Block>& blocks) const {
  if (threads_ == 1) return blocks;
  std::vector<Block> pieces;
  for (const Block& block : blocks) {
    Block piece = block;
    piece.bag_count = piece.lookup_count = 0;
    for (std::size_t bag = block.first_bag; bag < block.first_bag + block.bag_count; bag++) {
      piece.bag_count++;
      piece.lookup_count += batch.lengths[bag];
      if (piece.lookup_count < piece_lookups) continue;
      pieces.push_back(piece);
      const std::size_t vectors = batch.pooling == Pooling::none ? piece.lookup_count : piece.bag_count;
      piece.first_output += vectors * tables_[block.table].dim;
      piece.first_bag += piece.bag_count;
      piece.first_lookup += piece.lookup_count;
      piece.bag_count = piece.lookup_count = 0;
    }
    if (piece.bag_count != 0) pieces.push_back(piece);
  }
  return pieces;
}

void Operator::lookup(const Batch& batch, const std::vector<Block>& blocks, float* output) const {
  const std::vector<Block> pieces = pieces_of(batch, blocks);
  parallel_for(workers_for(lookups_of(blocks)), pieces.size(), [&](std::size_t n, unsigned) {
    kernels_.lookup(tables_[pieces[n].table], batch, pieces[n], output + pieces[n].first_output);
  });
}

void Operator::weight_gradient(const Batch& batch, const std::vector<Block>& blocks, const float* gradient,
                               float* result) const {
  const std::vector<Block> pieces = pieces_of(batch, blocks);
  parallel_for(workers_for(lookups_of(blocks)), pieces.size(), [&](std::size_t n, unsigned) {
    const Block& piece = pieces[n];
    kernels_.weight_gradient(tables_[piece.table], batch, piece, gradient + piece.first_output,
                             result + piece.first_lookup);
  });
}

std::vector<BadTable> Operator::update(const Batch& batch, const std::vector<Block>& blocks, const float* gradient,
                                       const Step& step) {
  return run(batch, blocks, gradient, step, {});
}

void Operator::sum_rows(const Batch& batch, const std::vector<Block>& blocks, const float* gradient,
                        const MakeRoom& make_room) {
  run(batch, blocks, gradient, {}, make_room);
}

// A key is the number of a vector of the gradient within the batch: a bag, or a lookup for sequences. With weights keys
// are lookups, and a list gives the bag of each.
std::vector<BadTable> Operator::run(const Batch& batch, const std::vector<Block>& blocks, const float* gradient,
                                    const Step& step, const MakeRoom& make_room) {
  const bool is_sequence = batch.pooling == Pooling::none;
  std::vector<Part> parts;
  std::vector<std::size_t> part_of(tables_.size(), SIZE_MAX);
  std::vector<std::int64_t> shifts;
  bool is_shared = false;
  for (std::size_t n = 0; n < blocks.size(); n++) {
    const Block& block = blocks[n];
    const std::size_t first_vector = is_sequence ? block.first_lookup : block.first_bag;
    shifts.push_back(static_cast<std::int64_t>(block.first_output) -
                     static_cast<std::int64_t>(first_vector * tables_[block.table].dim));
    if (block.lookup_count == 0) continue;
    std::size_t& place = part_of[block.table];
    if (place == SIZE_MAX) {
      place = parts.size();
      parts.push_back({&tables_[block.table], block.table, {}});
    }
    parts[place].blocks.push_back(n);
    parts[place].lookup_count += block.lookup_count;
    is_shared = is_shared || parts[place].blocks.size() > 1;
  }
  if (parts.empty()) return {};
  std::ranges::sort(parts, {}, &Part::number);

  Gradients gradients{};
  gradients.gradient = gradient;
  gradients.shifts = shifts.data();
  gradients.weights = batch.weights;
  gradients.slices = batch.slices;
  if (batch.pooling == Pooling::mean) gradients.lengths = batch.lengths;
  const Block& last = blocks.back();
  if (is_shared) {
    const std::size_t vectors = is_sequence ? last.first_lookup + last.lookup_count : last.first_bag + last.bag_count;
    auto* owners = static_cast<std::uint32_t*>(owners_.reserve(vectors * sizeof(std::uint32_t)));
    gradients.block_of = owners;
    for (std::uint32_t n = 0; n < blocks.size(); n++)
      owners = std::fill_n(owners, is_sequence ? blocks[n].lookup_count : blocks[n].bag_count, n);
  }
  if (batch.weights != nullptr) {
    auto* bags = static_cast<std::uint32_t*>(bags_.reserve(lookups_of(blocks) * sizeof(std::uint32_t)));
    gradients.bag_of_lookup = bags;
    for (std::size_t bag = 0; bag < last.first_bag + last.bag_count; bag++)
      bags = std::fill_n(bags, batch.lengths[bag], static_cast<std::uint32_t>(bag));
  }

  // One thread processes one table after another. This needs less memory, and the sorted entries are still cached.
  const std::size_t at_once = threads_ == 1 ? 1 : parts.size();
  const Call call{batch, blocks, step, gradients, make_room};
  for (std::size_t n = 0; n < parts.size(); n += at_once) take_turn(call, std::span(parts).subspan(n, at_once));

  std::vector<BadTable> bad;
  for (const Part& part : parts)
    if (part.bad.count != 0) bad.push_back({part.number, part.bad.count, part.bad.first});
  return bad;
}

void Operator::take_turn(const Call& call, std::span<Part> parts) {
  std::size_t lookups = 0;
  bool needs_both = false;
  std::vector<std::size_t> starts;
  for (Part& part : parts) {
    part.gradients = gradients_of(call, part);
    starts.push_back(lookups);
    lookups += part.lookup_count;
    needs_both = needs_both || RowSort(part.table->row_count).buffer_count() > 1;
  }
  auto* one = static_cast<Entry*>(entries_.reserve(lookups * sizeof(Entry)));
  auto* other = needs_both ? static_cast<Entry*>(others_.reserve(lookups * sizeof(Entry))) : one;
  const unsigned workers = workers_for(lookups);
  parallel_for(workers, parts.size(), [&](std::size_t n, unsigned) {
    parts[n].sorted = sort(call, parts[n], one + starts[n], other + starts[n]);
  });

  std::vector<Piece> pieces;
  std::vector<CutRun> runs;
  for (Part& part : parts) cut(part, pieces, runs);
  if (optimizer_ == Optimizer::none) count_rows(pieces, call.make_room);

  std::size_t stride = 0, levels = 0, cut_pieces = 0;
  for (const Piece& piece : pieces) {
    stride = std::max(stride, sum_stride(piece.part->table->dim));
    levels = std::max(levels, sum_count(piece.entries.size(), piece.part->gradients.slices != nullptr));
  }
  for (const CutRun& run : runs) cut_pieces += run.piece_count;
  auto* sums = static_cast<float*>(sums_.reserve((workers * levels + cut_pieces) * stride * sizeof(float)));
  float* sum = sums + workers * levels * stride;
  for (const CutRun& run : runs)
    for (std::size_t n = 0; n < run.piece_count; n++, sum += stride) pieces[run.first_piece + n].sum = sum;

  parallel_for(workers, pieces.size(), [&](std::size_t n, unsigned worker) {
    Piece& piece = pieces[n];
    const RowUpdate update = job(call, piece, sums + worker * levels * stride);
    if (piece.sum == nullptr)
      piece.bad = kernels_.update(update);
    else
      std::copy_n(kernels_.sum(update), sum_stride(piece.part->table->dim), piece.sum);
  });

  for (const CutRun& run : runs) {
    const std::span<Piece> own = std::span(pieces).subspan(run.first_piece, run.piece_count);
    const std::size_t columns = sum_stride(own.front().part->table->dim);
    TreeStack stack;
    std::size_t next = 0;  // Sums on the stack are those of the first pieces.
    const auto add_top = [&] {
      next--;
      for (std::size_t column = 0; column < columns; column++) own[next - 1].sum[column] += own[next].sum[column];
    };
    for (Piece& piece : own) {
      for (std::size_t n = stack.push(piece.leaf); n != 0; n--) add_top();
      std::swap(own[next++].sum, piece.sum);
    }
    for (std::size_t n = stack.depth(); n > 1; n--) add_top();
    RowUpdate update = job(call, own.front(), sums);
    update.count = 1;
    update.known_sum = own.front().sum;
    own.front().bad = kernels_.update(update);
  }
  for (const Piece& piece : pieces) {
    BadRows& bad = piece.part->bad;
    if (bad.count == 0) bad.first = piece.bad.first;
    bad.count += piece.bad.count;
  }
}

std::span<const Entry> Operator::sort(const Call& call, const Part& part, Entry* one, Entry* other) const {
  const Batch& batch = call.batch;
  const bool keys_are_lookups = batch.pooling == Pooling::none || batch.weights != nullptr;
  const auto each = [&](auto take) {
    for (const std::size_t n : part.blocks) {
      const Block& block = call.blocks[n];
      std::size_t lookup = block.first_lookup;
      for (std::size_t bag = block.first_bag; bag < block.first_bag + block.bag_count; bag++)
        for (const std::size_t end = lookup + batch.lengths[bag]; lookup < end; lookup++)
          if (const std::int64_t id = batch.values[lookup]; id >= 0)
            take(static_cast<std::uint32_t>(id), static_cast<std::uint32_t>(keys_are_lookups ? lookup : bag));
    }
  };
  return RowSort(part.table->row_count)(each, one, other);
}

// Pieces have about piece_lookups and end with a row. Runs longer than two pieces are cut inside.
void Operator::cut(Part& part, std::vector<Piece>& pieces, std::vector<CutRun>& runs) const {
  const std::span<const Entry> all = part.sorted;
  if (threads_ == 1) {
    pieces.push_back({&part, all});
    return;
  }
  for (auto at = all.begin(); at != all.end();) {
    if (all.end() - at <= static_cast<std::ptrdiff_t>(piece_lookups)) {
      pieces.push_back({&part, {at, all.end()}});
      return;
    }
    const auto run = std::ranges::equal_range(at, all.end(), at[piece_lookups].row(), {}, &Entry::row);
    if (run.size() <= 2 * piece_lookups) {
      pieces.push_back({&part, {at, run.end()}});
    } else {
      if (at != run.begin()) pieces.push_back({&part, {at, run.begin()}});
      const std::size_t first = pieces.size();
      cut_run(part, {run.begin(), run.end()}, part.gradients.slices == nullptr ? 0 : TreeStack::slice_levels, pieces);
      runs.push_back({first, pieces.size() - first});
    }
    at = run.end();
  }
}

// Cuts the lookups of one row below a node of the tree over slices, whose halves are nodes of `level`.
void Operator::cut_run(Part& part, std::span<const Entry> run, std::size_t level, std::vector<Piece>& pieces) {
  if (run.empty()) return;
  const std::uint64_t slice = part.gradients.slices == nullptr ? 0 : part.gradients.slice_of(run.front());
  if (level == 0 || run.size() <= piece_lookups) {
    for (std::size_t first = 0; first < run.size(); first += piece_lookups)
      pieces.push_back({&part, run.subspan(first, std::min(run.size() - first, piece_lookups)),
                        TreeStack::leaf(slice, first / chunk_lookups)});
    return;
  }
  const auto is_left = [&](const Entry& entry) { return (part.gradients.slice_of(entry) >> (level - 1) & 1) == 0; };
  const auto middle = std::ranges::partition_point(run, is_left);
  cut_run(part, {run.begin(), middle}, level - 1, pieces);
  cut_run(part, {middle, run.end()}, level - 1, pieces);
}

// Numbers the rows of each table, and makes room for their sums.
void Operator::count_rows(std::span<Piece> pieces, const MakeRoom& make_room) {
  std::size_t count = 0;
  for (std::size_t n = 0; n < pieces.size(); n++) {
    Piece& piece = pieces[n];
    const bool is_first = n == 0 || pieces[n - 1].part != piece.part;
    if (is_first) count = 0;
    if (!piece.entries.empty()) {
      // Pieces of one row have the same number.
      if (!is_first && pieces[n - 1].entries.back().row() == piece.entries.front().row()) count--;
      piece.first_row = count++;
      for (std::size_t at = 1; at < piece.entries.size(); at++)
        count += piece.entries[at].row() != piece.entries[at - 1].row();
    }
    if (count != 0 && (n + 1 == pieces.size() || pieces[n + 1].part != piece.part))
      piece.part->sums = make_room(piece.part->number, count);
  }
}

// The gradients of a table's lookups.
Gradients Operator::gradients_of(const Call& call, const Part& part) {
  Gradients gradients = call.gradients;
  gradients.dim = part.table->dim;
  if (part.blocks.size() == 1) {
    gradients.block_of = nullptr;
    gradients.shifts += part.blocks.front();
  }
  // Slices rise from block to block.
  if (gradients.slices != nullptr && gradients.slices[part.blocks.front()] == gradients.slices[part.blocks.back()])
    gradients.slices = nullptr;
  return gradients;
}

RowUpdate Operator::job(const Call& call, const Piece& piece, float* sums) const {
  const Part& part = *piece.part;
  RowUpdate update{part.table,           optimizer_,     &call.step, piece.entries.data(),
                   piece.entries.size(), part.gradients, sums};
  if (optimizer_ == Optimizer::none) {
    update.rows = part.sums.rows + piece.first_row;
    update.row_sums = part.sums.sums + piece.first_row * part.table->dim;
  }
  return update;
}

}  // namespace sennit::kernels
