// SPDX-License-Identifier: Apache-2.0
// Counters with their names, as a rank reads its own. Names are those of its page (counter_page.hpp).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace sennit {

using CounterList = std::vector<std::pair<std::string, uint64_t>>;

// A struct of 64-bit integers as these, in their order.
template <class Counters>
auto words_of(const Counters& counters) {
  return std::bit_cast<std::array<uint64_t, sizeof(Counters) / sizeof(uint64_t)>>(counters);
}

template <class Counters>
void append_counters(CounterList& out, const Counters& counters) {
  const auto words = words_of(counters);
  const std::vector<std::string> names = Counters::names();
  for (size_t i = 0; i < words.size(); ++i) out.emplace_back(names.at(i), words[i]);
}

template <class Counters>
void add_counters(Counters& sum, const Counters& one) {
  auto words = words_of(sum);
  const auto more = words_of(one);
  for (size_t i = 0; i < words.size(); ++i) words[i] += more[i];
  sum = std::bit_cast<Counters>(words);
}

}  // namespace sennit
