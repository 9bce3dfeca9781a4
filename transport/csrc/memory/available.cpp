// SPDX-License-Identifier: Apache-2.0
#include "memory/available.hpp"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace sennit {
namespace {

namespace fs = std::filesystem;

// The names of a control group's files, and of the entry of `memory.stat` for clean file pages (Linux,
// Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
struct Names {
  const char* limit;
  const char* used;
  const char* clean;
};
constexpr Names SECOND{"memory.max", "memory.current", "inactive_file"};
constexpr Names FIRST{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"};

// Nothing for "max" and for a file that is not there.
std::optional<uint64_t> number_in(const fs::path& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  if (!(file >> number)) return std::nullopt;
  return number;
}

// The number after `name` at the begin of a line.
std::optional<uint64_t> field_in(const fs::path& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string found;
    uint64_t number = 0;
    if (fields >> found >> number && found == name) return number;
  }
  return std::nullopt;
}

// The least memory that is left in a control group or in one around it, whose limits apply, too.
uint64_t left_in(const fs::path& root, const std::string& group, const Names& names) {
  uint64_t least = UINT64_MAX;
  for (fs::path level = fs::path(group).relative_path();; level = level.parent_path()) {
    const fs::path folder = root / level;
    const auto limit = number_in(folder / names.limit), used = number_in(folder / names.used);
    if (limit && used) {
      // Clean file pages count as used, but can be reclaimed.
      const uint64_t freed = *limit + field_in(folder / "memory.stat", names.clean).value_or(0);
      least = std::min(least, freed - std::min(freed, *used));
    }
    if (level.empty()) return least;
  }
}

}  // namespace

uint64_t available_bytes(const fs::path& proc, const fs::path& cgroup) {
  uint64_t least = UINT64_MAX;
  if (const auto host_kib = field_in(proc / "meminfo", "MemAvailable:")) least = *host_kib << 10;
  std::ifstream groups(proc / "self" / "cgroup");
  for (std::string line; std::getline(groups, line);) {  // number:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string group = line.substr(second + 1);
    if (line.compare(0, first, "0") == 0) {
      least = std::min(least, left_in(cgroup, group, SECOND));
      continue;
    }
    std::istringstream controllers(line.substr(first + 1, second - first - 1));
    for (std::string name; std::getline(controllers, name, ',');) {
      if (name == "memory") least = std::min(least, left_in(cgroup / "memory", group, FIRST));
    }
  }
  return least;
}

}  // namespace sennit
