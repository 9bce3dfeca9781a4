// SPDX-License-Identifier: Apache-2.0
#include "narrow_store.hpp"

#include <algorithm>
#include <string>

#include "store_error.hpp"

namespace sennit::memory {

NarrowStore::NarrowStore(RowStore& below, std::vector<kernels::Table> tables, bool is_stochastic, std::uint64_t seed,
                         std::uint64_t number)
    : below_(below), tables_(std::move(tables)), kernels_(*kernels::available_kernels()[0]), number_(number) {
  step_.is_stochastic = is_stochastic;
  step_.seed = seed;
  std::uint64_t end = 0;
  for (const kernels::Table& table : tables_) ends_.push_back(end += table.row_count);
}

NarrowStore::Place NarrowStore::place_of(std::uint64_t row) const {
  const auto end = std::upper_bound(ends_.begin(), ends_.end(), row);
  if (end == ends_.end())
    throw StoreError(Fault::ARGUMENT, "row " + std::to_string(row) + "; allowed: below " +
                                          std::to_string(ends_.empty() ? 0 : ends_.back()));
  const kernels::Table& table = tables_[static_cast<std::size_t>(end - ends_.begin())];
  return {&table, static_cast<std::uint32_t>(row - (*end - table.row_count))};
}

void NarrowStore::exchange(std::span<const RowAt> written, std::span<const RowAt> wanted, const Lines& lines) {
  if (written.empty() && wanted.empty()) return;
  if (!written.empty()) step_.number = static_cast<std::uint32_t>(++number_);
  Lines narrow;
  memory_.resize(lines.parts.size());
  for (std::size_t part = 0; part < lines.parts.size(); part++) {
    const std::size_t row_bytes = part == 0 ? lines.parts[0].row_bytes / 2 : lines.parts[part].row_bytes;
    memory_[part].resize((written.size() + wanted.size()) * row_bytes);
    narrow.parts.push_back({memory_[part].data(), row_bytes});
  }
  const auto weights = [&](std::uint64_t line) {
    return reinterpret_cast<float*>(lines.parts[0].data + line * lines.parts[0].row_bytes);
  };
  const auto narrow_weights = [&](std::uint64_t line) {
    return narrow.parts[0].data + line * narrow.parts[0].row_bytes;
  };
  const auto copy_others = [](const Lines& to, std::uint64_t line, const Lines& from, std::uint64_t source) {
    for (std::size_t part = 1; part < to.parts.size(); part++) {
      const std::size_t size = to.parts[part].row_bytes;
      std::memcpy(to.parts[part].data + line * size, from.parts[part].data + source * size, size);
    }
  };
  written_.clear();
  wanted_.clear();
  for (const RowAt& at : written) {
    const std::uint64_t line = written_.size();
    const Place place = place_of(at.row);
    kernels_.narrow_row(*place.table, step_, place.row, weights(at.line), narrow_weights(line));
    copy_others(narrow, line, lines, at.line);
    written_.push_back({at.row, line});
  }
  for (const RowAt& at : wanted) {
    place_of(at.row);
    wanted_.push_back({at.row, written_.size() + wanted_.size()});
  }
  below_.exchange(written_, wanted_, narrow);
  for (std::size_t n = 0; n < wanted.size(); n++) {
    const std::uint64_t line = wanted_[n].line;
    kernels_.widen_row(*place_of(wanted[n].row).table, narrow_weights(line), weights(wanted[n].line));
    copy_others(lines, wanted[n].line, narrow, line);
  }
}

}  // namespace sennit::memory
