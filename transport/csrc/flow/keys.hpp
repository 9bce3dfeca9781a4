// SPDX-License-Identifier: Apache-2.0
// The keys of one region of memory: one for each device through which it may be reached, in the devices' order.
#pragma once

#include <array>
#include <cstdint>

namespace sennit::flow {

struct Keys {
  static constexpr uint32_t MAX_COUNT = 8;

  Keys(uint32_t key = 0) : of{key} {}

  uint32_t count = 1;
  std::array<uint32_t, MAX_COUNT> of{};
};

}  // namespace sennit::flow
