// SPDX-License-Identifier: Apache-2.0
// The caller's clock during one of its calls. What happens late in the call gets a later time.
#pragma once

#include <chrono>
#include <cstdint>

namespace sennit {

class CallClock {
 public:
  explicit CallClock(uint64_t now_us) : called_us_(now_us) {}

  uint64_t now_us() const {
    const auto passed = std::chrono::steady_clock::now() - called_;
    return called_us_ + static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(passed).count());
  }

 private:
  const uint64_t called_us_;
  const std::chrono::steady_clock::time_point called_ = std::chrono::steady_clock::now();
};

}  // namespace sennit
