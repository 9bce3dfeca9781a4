// SPDX-License-Identifier: Apache-2.0
// How much may be in flight. FlowConfig::congestion names one of the classes. congestion.cpp lists them.
//
// Each flow has one window for all its paths. Congestion of a path reduces the window by up to that path's share, while
// the path policy moves load to other paths. Windows are counted in full packets.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

namespace sennit::flow {

// What a flow learns of one path from two successive echoes of the peer: the input of path policies and congestion
// control. Counts are arrivals at the peer, duplicates included.
struct PathFeedback {
  uint64_t now_us;
  uint32_t path;
  uint32_t received_packets;
  uint32_t marked_packets;  // of them, with the ECN codepoint "congestion experienced" (RFC 3168)
  uint64_t fabric_us;       // round-trip time without the waits inside both hosts; 0: no sample
  uint64_t fabric_min_us;   // the minimum of its rail so far
  uint64_t queue_us() const { return fabric_us > fabric_min_us ? fabric_us - fabric_min_us : 0; }
  // A burst may be as large as what fills a round trip. Its end then waits for up to a round trip, though no queue
  // stays behind it. Targets allow for that on short ways. On longer ones, what they are longer by is subtracted.
  uint64_t standing_queue_us() const {
    const uint64_t burst_us = fabric_min_us > SHORT_WAY_US ? fabric_min_us - SHORT_WAY_US : 0;
    return queue_us() > burst_us ? queue_us() - burst_us : 0;
  }
  static constexpr uint64_t SHORT_WAY_US = 250;
};

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
  // Whether batches are spread over the round-trip time. A burst would only wait in the bottleneck's queue.
  virtual bool paces() const = 0;
  // `usable_paths` are not bad. `in_flight_packets` includes those that the echo acknowledges.
  virtual void on_feedback(const PathFeedback& feedback, uint32_t usable_paths, uint32_t in_flight_packets) = 0;
  // Packets were lost on a path that still answers. Single losses are no sign of congestion.
  virtual void on_losses(uint64_t now_us, uint32_t path, uint32_t packets) = 0;
};

// The names of all classes.
std::span<const std::string_view> congestion_controls();
// Throws std::invalid_argument with the allowed names.
std::unique_ptr<CongestionControl> make_congestion_control(std::string_view name, const CongestionLimits& limits);

std::unique_ptr<CongestionControl> make_dctcp(const CongestionLimits& limits);
std::unique_ptr<CongestionControl> make_swift(const CongestionLimits& limits);

}  // namespace sennit::flow
