// SPDX-License-Identifier: Apache-2.0
// A window that follows delay and ECN marks.
//
// Delay as in Swift (Kumar et al., SIGCOMM 2020): there is a target for the queueing delay in the fabric, without the
// waits inside the hosts. Below the target the window increases additively. Above it, the window decreases once in a
// round-trip time in proportion to the excess. ECN as in DCTCP (RFC 8257): the window decreases by half the smoothed
// fraction of marked packets. Each path judges its own round trips and takes only its share of the window, because
// other paths have other queues. Loss is a sign of congestion only if much of a round trip is lost at once.
#include <algorithm>
#include <vector>

#include "flow/congestion.hpp"

namespace sennit::flow {
namespace {

constexpr double WINDOW_MIN_PACKETS = 2;
// Half a MiB of full packets: what the loopback interface carries in a round-trip time, so that starting costs nothing
// there. Receivers limit the sum over their senders (ReceiveBudget).
constexpr double WINDOW_START_PACKETS = 128;
constexpr double INCREASE_PACKETS = 4;    // a round trip
constexpr double DELAY_GAIN = 0.8;        // Swift's beta
constexpr double DECREASE_MAX = 0.5;      // of a path's share, a round trip
constexpr double MARKED_GAIN = 1.0 / 16;  // RFC 8257, 3.3: g
// A fifth of a path's packets in a round-trip time, and at least half a batch: then a queue overflowed.
constexpr double LOSS_FRACTION = 0.2;
constexpr uint32_t LOSS_PACKETS = 8;
constexpr uint64_t ROUND_MIN_US = 20;

class Swift final : public CongestionControl {
 public:
  explicit Swift(const CongestionLimits& limits)
      : window_max_(limits.window_max_packets),
        target_us_(static_cast<double>(limits.target_queue_us)),
        window_(std::min(window_max_, WINDOW_START_PACKETS)),
        rounds_(limits.path_count) {}
  std::string_view name() const override { return "swift"; }
  uint32_t window_packets() const override { return static_cast<uint32_t>(window_); }
  bool paces() const override { return !is_starting_ && window_ < window_max_ / 2; }

  void on_feedback(const PathFeedback& feedback, uint32_t usable_paths, uint32_t in_flight_packets) override {
    Round& round = rounds_[feedback.path];
    round.received += feedback.received_packets;
    round.marked += feedback.marked_packets;
    if (feedback.fabric_us != 0) round.least_queue_us = std::min(round.least_queue_us, feedback.queue_us());
    // If the program does not fill the window, success does not show that a larger window would work.
    const bool is_filled = in_flight_packets + feedback.received_packets >= window_ / 2;
    const bool is_clear = feedback.marked_packets == 0 && static_cast<double>(feedback.queue_us()) < target_us_ / 2;
    if (is_filled && is_clear) {
      if (is_starting_)
        window_ += feedback.received_packets;
      else
        window_ += INCREASE_PACKETS * feedback.received_packets / window_;
    }
    if (feedback.now_us >= round.end_us) end_round(feedback, round, usable_paths);
    window_ = std::clamp(window_, std::min(WINDOW_MIN_PACKETS, window_max_), window_max_);
  }

  void on_losses(uint64_t, uint32_t path, uint32_t packets) override { rounds_[path].lost += packets; }

 private:
  struct Round {
    uint64_t end_us = 0;
    uint32_t received = 0, marked = 0, lost = 0;
    uint64_t least_queue_us = UINT64_MAX;
    double marked_fraction = 0;  // smoothed
  };

  void end_round(const PathFeedback& feedback, Round& round, uint32_t usable_paths) {
    const double received = std::max(round.received, 1u);
    round.marked_fraction += MARKED_GAIN * (round.marked / received - round.marked_fraction);
    double decrease = 0;
    if (round.marked != 0) {
      // The first marks end the start at once. The smoothed fraction alone would take sixteen round trips to rise.
      if (is_starting_) round.marked_fraction = std::max(round.marked_fraction, round.marked / received);
      decrease = round.marked_fraction / 2;
    }
    // The minimum delay of the round shows a standing queue, without this flow's own burst.
    if (round.least_queue_us != UINT64_MAX) {
      const auto queue_us = static_cast<double>(round.least_queue_us);
      if (queue_us > target_us_) decrease = std::max(decrease, DELAY_GAIN * (queue_us - target_us_) / queue_us);
    }
    if (round.lost >= LOSS_PACKETS && round.lost > LOSS_FRACTION * (round.lost + round.received))
      decrease = DECREASE_MAX;
    if (decrease > 0) {
      is_starting_ = false;
      window_ -= window_ * std::min(decrease, DECREASE_MAX) / std::max(usable_paths, 1u);
    }
    round.received = round.marked = round.lost = 0;
    round.least_queue_us = UINT64_MAX;
    round.end_us = feedback.now_us + std::max({feedback.fabric_us, feedback.fabric_min_us, ROUND_MIN_US});
  }

  const double window_max_, target_us_;
  double window_;
  bool is_starting_ = true;
  std::vector<Round> rounds_;  // by path
};

}  // namespace

std::unique_ptr<CongestionControl> make_swift(const CongestionLimits& limits) {
  return std::make_unique<Swift>(limits);
}

}  // namespace sennit::flow
