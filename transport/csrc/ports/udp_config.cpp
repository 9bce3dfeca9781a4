// SPDX-License-Identifier: Apache-2.0
#include "ports/udp_config.hpp"

#include <stdexcept>

#include "flow/congestion.hpp"
#include "flow/path_policy.hpp"

namespace sennit {
namespace {

constexpr uint32_t PATH_MAX_COUNT = 256;
constexpr uint32_t WINDOW_MIN_BYTES = 64 << 10, WINDOW_MAX_BYTES = 64 << 20;

}  // namespace

void UdpConfig::check() const {
  if (rails.empty()) throw std::invalid_argument("udp: no rail given; name at least one local address");
  if (path_count < 1 || path_count * rails.size() > PATH_MAX_COUNT)
    throw std::invalid_argument("udp: " + std::to_string(path_count) + " paths over " + std::to_string(rails.size()) +
                                " rails; 1 to " + std::to_string(PATH_MAX_COUNT) + " in all are allowed");
  if (window_bytes < WINDOW_MIN_BYTES || window_bytes > WINDOW_MAX_BYTES)
    throw std::invalid_argument("udp: a window of " + std::to_string(window_bytes) + " bytes; " +
                                std::to_string(WINDOW_MIN_BYTES) + " to " + std::to_string(WINDOW_MAX_BYTES) +
                                " are allowed");
  // Flows come with their peers; a wrong name shall not wait for them.
  flow::make_path_policy(path_policy, path_count, seed);
  flow::make_congestion_control(congestion, {.window_max_packets = 1, .path_count = 1, .target_queue_us = 1});
}

}  // namespace sennit
