// SPDX-License-Identifier: Apache-2.0
// Classes by name: the allowed values of a setting, and the object that each makes.
#pragma once
#include <array>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

namespace sennit::flow {

template <class Make>
struct Named {
  std::string_view name;
  Make make;
};

template <class Make, size_t COUNT>
struct Registry {
  explicit constexpr Registry(const std::array<Named<Make>, COUNT>& entries) : entries_(entries) {
    for (size_t i = 0; i < COUNT; ++i) names[i] = entries[i].name;
  }

  // Throws std::invalid_argument with the setting, the value and the allowed values.
  Make find(std::string_view setting, std::string_view name) const {
    std::string allowed;
    for (const Named<Make>& entry : entries_) {
      if (entry.name == name) return entry.make;
      allowed.append(allowed.empty() ? "" : ", ").append(entry.name);
    }
    throw std::invalid_argument(
        std::string(setting).append(" \"").append(name).append("\"; allowed: ").append(allowed));
  }

  std::array<std::string_view, COUNT> names{};

 private:
  std::array<Named<Make>, COUNT> entries_;
};

}  // namespace sennit::flow
