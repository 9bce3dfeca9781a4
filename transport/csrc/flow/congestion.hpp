// SPDX-License-Identifier: Apache-2.0
// How much may be in flight. Classes by name, one a file; FlowConfig::congestion names one.
//
// One window a flow, fed by every path: a path's congestion takes its share from the window, and the path policy
// moves load away from it meanwhile. Windows are counted in full packets.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "flow/feedback.hpp"

namespace sennit::flow {

struct CongestionLimits {
  uint32_t window_max_packets;
  uint32_t path_count;
  uint64_t target_queue_us;  // FlowConfig::target_queue_us
};

class CongestionControl {
 public:
  virtual ~CongestionControl() = default;
  virtual std::string_view name() const = 0;
  virtual uint32_t window_packets() const = 0;
  // Batches are spread over the round trip, since a burst would only wait in the queue that limits us.
  virtual bool paces() const = 0;
  // `usable_paths`: those not bad. `in_flight_packets`: before what the echo acknowledges is taken off.
  virtual void on_feedback(const PathFeedback& feedback, uint32_t usable_paths, uint32_t in_flight_packets) = 0;
  // Packets found lost on a path that goes on answering. Single ones are not congestion.
  virtual void on_losses(uint64_t now_us, uint32_t path, uint32_t packets) = 0;
};

// The names there are.
std::span<const std::string_view> congestion_controls();
// Throws std::invalid_argument naming the allowed names.
std::unique_ptr<CongestionControl> make_congestion_control(std::string_view name, const CongestionLimits& limits);

std::unique_ptr<CongestionControl> make_fixed_window(const CongestionLimits& limits);
std::unique_ptr<CongestionControl> make_swift(const CongestionLimits& limits);

}  // namespace sennit::flow
