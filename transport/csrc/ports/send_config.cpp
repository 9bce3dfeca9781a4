// SPDX-License-Identifier: Apache-2.0
#include "ports/send_config.hpp"

#include <stdexcept>

#include "flow/congestion.hpp"
#include "flow/path_policy.hpp"

namespace sennit {
namespace {

constexpr uint32_t WINDOW_MIN_BYTES = 64 << 10, WINDOW_MAX_BYTES = 64 << 20;

}  // namespace

void SendConfig::check(const std::string& port_name, size_t rail_count) const {
  if (rail_count == 0) throw std::invalid_argument(port_name + ": no rail given; name at least one local address");
  if (path_count < 1 || path_count * rail_count > PATH_MAX_COUNT)
    throw std::invalid_argument(port_name + ": " + std::to_string(path_count) + " paths over " +
                                std::to_string(rail_count) + " rails; 1 to " + std::to_string(PATH_MAX_COUNT) +
                                " in all are allowed");
  if (window_bytes < WINDOW_MIN_BYTES || window_bytes > WINDOW_MAX_BYTES)
    throw std::invalid_argument(port_name + ": a window of " + std::to_string(window_bytes) + " bytes; " +
                                std::to_string(WINDOW_MIN_BYTES) + " to " + std::to_string(WINDOW_MAX_BYTES) +
                                " are allowed");
  // Flows are made with their peers, but a wrong name must fail before that.
  flow::make_path_policy(path_policy, path_count, seed);
  flow::make_congestion_control(congestion, {.window_max_packets = 1, .path_count = 1, .target_queue_us = 1});
}

std::string SendConfig::describe() const {
  return std::to_string(path_count) + " paths a rail (" + path_policy + "), window " + std::to_string(window_bytes) +
         " bytes (" + congestion + ")";
}

}  // namespace sennit
