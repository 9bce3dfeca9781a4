// SPDX-License-Identifier: Apache-2.0
#include "runs.hpp"

#include <algorithm>

namespace sennit::kernels {

std::size_t runs_of(const std::int64_t* keys, std::size_t members, std::uint32_t key_count, const Runs& runs,
                    std::vector<Entry>& scratch) {
  std::size_t kept = 0, count = 0;
  const auto append = [&](std::int64_t key, std::size_t member) {
    if (count == 0 || key != runs.keys[count - 1]) {
      runs.keys[count] = key;
      runs.starts[count++] = static_cast<std::int64_t>(kept);
    }
    runs.order[kept++] = static_cast<std::int64_t>(member);
    runs.places[member] = static_cast<std::int64_t>(count) - 1;
  };
  if (members != 0 && keys[0] >= 0 && std::is_sorted(keys, keys + members)) {
    for (std::size_t member = 0; member < members; member++) append(keys[member], member);
  } else {
    RowSort sort(key_count);
    if (scratch.size() < members * sort.buffer_count()) scratch.resize(members * sort.buffer_count());
    const auto each = [&](auto take) {
      for (std::size_t member = 0; member < members; member++)
        if (keys[member] >= 0) take(static_cast<std::uint32_t>(keys[member]), static_cast<std::uint32_t>(member));
    };
    std::fill_n(runs.places, members, -1);
    Entry* other = scratch.data() + members * (sort.buffer_count() - 1);
    for (const Entry& entry : sort(each, scratch.data(), other)) append(entry.row(), entry.key());
  }
  runs.starts[count] = static_cast<std::int64_t>(kept);
  return count;
}

}  // namespace sennit::kernels
