// SPDX-License-Identifier: Apache-2.0
// The settings of every network port: how this rank sends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "flow/flow.hpp"

namespace sennit {

class CounterPage;

inline constexpr uint32_t PATH_MAX_COUNT = 256;

// Peers may have other settings. If path counts differ, the smaller one is used.
struct SendConfig {
  uint32_t path_count = flow::FlowConfig{}.path_count;  // entropies for each peer and rail
  uint64_t seed = 0;  // for choices that tests repeat; keys and queue pairs are always random
  std::string path_policy{flow::FlowConfig{}.path_policy};  // flow/path_policy.hpp
  std::string congestion{flow::FlowConfig{}.congestion};    // flow/congestion.hpp
  // The most in flight to one peer, whose receive memory may allow less. More than fits into the processor's
  // second-level cache only makes copies slower, unless the network holds more in one round trip.
  uint32_t window_bytes = flow::FlowConfig{}.window_bytes;
  // A peer that others wait for is lost after this time of silence.
  uint64_t peer_timeout_us = flow::FlowConfig{}.peer_timeout_us;
  CounterPage* counter_page = nullptr;  // where to count, outlives the port; null: in the port

  // Throws std::invalid_argument with the value and the allowed range.
  void check(const std::string& port_name, size_t rail_count) const;
  // "4 paths a rail (round_robin), window 2097152 bytes (fixed)"
  std::string describe() const;
};

}  // namespace sennit
