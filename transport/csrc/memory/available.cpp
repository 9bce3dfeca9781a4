// SPDX-License-Identifier: Apache-2.0
#include "memory/available.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

namespace sennit {
namespace {

// The names of a control group's files, and of what `memory.stat` has that counts as used and can be reclaimed: pages
// of files, and what the kernel caches (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
struct Names {
  const char* limit;
  const char* used;
  std::array<std::string_view, 3> reclaimable;
};
constexpr Names SECOND{"/memory.max", "/memory.current", {"inactive_file", "active_file", "slab_reclaimable"}};
constexpr Names FIRST{"/memory.limit_in_bytes",
                      "/memory.usage_in_bytes",
                      {"total_inactive_file", "total_active_file", "total_slab_reclaimable"}};

// Calls `take` with each line of a file, without its end. C's library reads it: with std::ifstream and std::filesystem
// ranks found 0 bytes left if they had loaded a CUDA build of torch before this library.
void for_each_line(const std::string& path, const std::function<void(const std::string&)>& take) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), &std::fclose);
  if (file == nullptr) return;
  std::string line;
  for (int one; (one = std::fgetc(file.get())) != EOF;) {
    if (one != '\n') {
      line.push_back(static_cast<char>(one));
      continue;
    }
    take(line);
    line.clear();
  }
  if (!line.empty()) take(line);
}

std::optional<uint64_t> number_of(const char* text) {
  unsigned long long number = 0;
  return std::sscanf(text, "%llu", &number) == 1 ? std::optional<uint64_t>(number) : std::nullopt;
}

// Nothing for "max" and for a file that is not there.
std::optional<uint64_t> number_in(const std::string& path) {
  std::optional<uint64_t> found;
  for_each_line(path, [&](const std::string& line) { found = number_of(line.c_str()); });
  return found;
}

// The sum of the numbers after these names, which begin lines; nothing if there is none.
template <size_t N>
std::optional<uint64_t> sum_in(const std::string& path, const std::array<std::string_view, N>& names) {
  std::optional<uint64_t> sum;
  for_each_line(path, [&](const std::string& line) {
    const size_t end = line.find(' ');
    if (end == std::string::npos || std::find(names.begin(), names.end(), line.substr(0, end)) == names.end()) return;
    if (const auto number = number_of(line.c_str() + end)) sum = sum.value_or(0) + *number;
  });
  return sum;
}

// The least memory that is left in a control group or in one around it, whose limits apply, too. `group`: "" or "/a/b".
uint64_t left_in(const std::string& root, std::string group, const Names& names) {
  uint64_t least = UINT64_MAX;
  while (true) {
    const std::string folder = root + group;
    const auto limit = number_in(folder + names.limit), used = number_in(folder + names.used);
    if (limit && used) {
      const uint64_t held = *used - std::min(*used, sum_in(folder + "/memory.stat", names.reclaimable).value_or(0));
      least = std::min(least, *limit - std::min(*limit, held));
    }
    if (group.empty()) return least;
    group.resize(std::min(group.size() - 1, group.rfind('/')));
  }
}

// Whether a list with commas has this name.
bool has(std::string_view list, std::string_view name) {
  while (true) {
    const size_t comma = list.find(',');
    if (list.substr(0, comma) == name) return true;
    if (comma == std::string_view::npos) return false;
    list.remove_prefix(comma + 1);
  }
}

}  // namespace

uint64_t available_bytes(const std::string& proc, const std::string& cgroup) {
  uint64_t least = UINT64_MAX;
  if (const auto host_kib = sum_in<1>(proc + "/meminfo", {"MemAvailable:"})) least = *host_kib << 10;
  for_each_line(proc + "/self/cgroup", [&](const std::string& line) {  // number:controllers:path
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) return;
    const std::string group = line.back() == '/' ? "" : line.substr(second + 1);
    if (line.compare(0, first, "0") == 0) {
      least = std::min(least, left_in(cgroup, group, SECOND));
    } else if (has(std::string_view(line).substr(first + 1, second - first - 1), "memory")) {
      least = std::min(least, left_in(cgroup + "/memory", group, FIRST));
    }
  });
  return least;
}

}  // namespace sennit
