// SPDX-License-Identifier: Apache-2.0
// Hits of tracepoints kept for the tests of this library, which are built with SENNIT_TRACE_RECORDED: what a tracer
// would see, without one.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>
#include <vector>

namespace sennit::trace {

struct Hit {
  std::string_view name;
  std::vector<uint64_t> arguments;
};

// Where hits of this thread go; null: nowhere.
inline thread_local std::vector<Hit>* recorder = nullptr;

template <class Argument>
uint64_t number_of(Argument argument) {
  if constexpr (std::is_pointer_v<Argument>)
    return reinterpret_cast<uintptr_t>(argument);
  else
    return static_cast<uint64_t>(argument);
}

template <class... Arguments>
void record(std::string_view name, Arguments... arguments) {
  if (recorder != nullptr) recorder->push_back({name, {number_of(arguments)...}});
}

}  // namespace sennit::trace
