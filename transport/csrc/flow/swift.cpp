// SPDX-License-Identifier: Apache-2.0
// A window that follows delay, ECN marks and full queues.
//
// Delay as in Swift (Kumar et al., SIGCOMM 2020): there is a target for the queueing delay in the fabric, without the
// waits inside the hosts. Below the target the window increases additively. Above it, the window decreases once in a
// round-trip time in proportion to the excess. The target is higher for small windows, so that the windows of several
// flows become equal. ECN as in DCTCP (RFC 8257): the window decreases by half the smoothed fraction of marked packets.
// Each path judges its own round trips and takes only its share of the window, because other paths have other queues.
// Loss is a sign of congestion only if much of a round trip is lost at once.
//
// Delay alone has two weaknesses, and an answer to each:
//   - a flow that begins behind the queue of another takes that queue for distance, and starves the other. So a flow
//     that has seen no short queue for a while sends little for one round trip. What it then measures is less wrong
//   - a TCP flow fills the queue, whoever yields. If a queue stays long although the window shrinks, the flow competes
//     as TCP does: it grows until a packet is lost (RFC 9438, 4.3), and then looks again whether the queue can be short
#include <algorithm>
#include <cmath>
#include <vector>

#include "flow/congestion.hpp"

namespace sennit::flow {
namespace {

constexpr double WINDOW_MIN_PACKETS = 2;
// Half a MiB of full packets: what the loopback interface carries in a round-trip time, so that starting costs nothing
// there. Receivers limit the sum over their senders (ReceiveBudget).
constexpr double WINDOW_START_PACKETS = 128;
// A round trip. Large windows grow faster, small ones slower: they may be those of many flows.
constexpr double INCREASE_FRACTION = 1.0 / 16, INCREASE_MIN_PACKETS = 1, INCREASE_MAX_PACKETS = 4;
constexpr double DELAY_GAIN = 0.8;        // Swift's beta
constexpr double DECREASE_MAX = 0.5;      // of a path's share, a round trip
constexpr double MARKED_GAIN = 1.0 / 16;  // RFC 8257, 3.3: g
// The target is half of the configured one and this much for a window of 1: the configured one for 64 packets.
constexpr double TARGET_FIXED = 0.5, TARGET_SCALED = 4;
// A fifth of the packets in a round-trip time: a queue overflowed. Two, because windows may be small.
constexpr double LOSS_FRACTION = 0.2;
constexpr uint32_t LOSS_PACKETS = 2;
constexpr uint64_t ROUND_MIN_US = 20;
// A queue below this part of the target is short.
constexpr double SHORT_QUEUE = 0.25;
constexpr uint32_t DRAIN_AFTER_ROUNDS = 128;
constexpr double DRAINED = 1.0 / 8;  // of the window
// Our own flows keep a queue below this much of their targets, and need no more round trips for it.
constexpr double LONG_QUEUE = 1.5;
constexpr uint32_t COMPETE_AFTER_ROUNDS = 6;
constexpr double COMPETING_INCREASE_PACKETS = 0.53, COMPETING_KEPT = 0.7;  // RFC 9438, 4.3: alpha, beta
constexpr double LOOKING_LEAST = 0.25;  // of the window, while the flow looks whether the queue can be short

class Swift final : public CongestionControl {
 public:
  explicit Swift(const CongestionLimits& limits)
      : window_max_(limits.window_max_packets),
        target_us_(static_cast<double>(limits.target_queue_us)),
        window_(std::min(window_max_, WINDOW_START_PACKETS)),
        path_rounds_(limits.path_count) {}
  std::string_view name() const override { return "swift"; }
  uint32_t window_packets() const override {
    return static_cast<uint32_t>(bounded(is_draining_ ? window_ * DRAINED : window_));
  }
  bool paces() const override { return !is_starting_ && window_ < window_max_ / 2; }

  void on_feedback(const PathFeedback& feedback, uint32_t usable_paths, uint32_t in_flight_packets) override {
    PathRound& round = path_rounds_[feedback.path];
    round.received += feedback.received_packets;
    round.marked += feedback.marked_packets;
    round_.received += feedback.received_packets;
    if (feedback.fabric_us != 0) {
      round.least_queue_us = std::min(round.least_queue_us, feedback.queue_us());
      round_.least_queue_us = std::min(round_.least_queue_us, feedback.queue_us());
    }
    // If the program does not fill the window, success does not show that a larger window would work.
    const bool is_filled = in_flight_packets + feedback.received_packets >= window_ / 2;
    const bool is_clear = is_competing_ || static_cast<double>(feedback.queue_us()) < target_us();
    if (is_filled && is_clear && feedback.marked_packets == 0 && !is_draining_)
      window_ += is_starting_ ? feedback.received_packets : increase() * feedback.received_packets / window_;
    if (feedback.now_us >= round.end_us) end_path_round(feedback, round, usable_paths);
    if (feedback.now_us >= round_.end_us) end_round(feedback);
    window_ = bounded(window_);
  }

  void on_losses(uint64_t, uint32_t, uint32_t packets) override { round_.lost += packets; }

 private:
  static constexpr uint64_t NONE = UINT64_MAX;
  struct PathRound {
    uint64_t end_us = 0, least_queue_us = NONE;
    uint32_t received = 0, marked = 0;
    double marked_fraction = 0;  // smoothed
  };
  struct Round {  // of all paths
    uint64_t end_us = 0, least_queue_us = NONE;
    uint32_t received = 0, lost = 0;
  };

  double bounded(double window) const {
    return std::clamp(window, std::min(WINDOW_MIN_PACKETS, window_max_), window_max_);
  }
  double target_us() const { return target_us_ * (TARGET_FIXED + TARGET_SCALED / std::sqrt(window_)); }
  double increase() const {
    if (is_competing_) return COMPETING_INCREASE_PACKETS;
    return std::clamp(window_ * INCREASE_FRACTION, INCREASE_MIN_PACKETS, INCREASE_MAX_PACKETS);
  }
  void shrink_to(double window) {
    is_starting_ = false;
    window_ = window;
  }
  static uint64_t end_of_round_us(const PathFeedback& feedback) {
    return feedback.now_us + std::max({feedback.fabric_us, feedback.fabric_min_us, ROUND_MIN_US});
  }

  void end_path_round(const PathFeedback& feedback, PathRound& round, uint32_t usable_paths) {
    const double received = std::max(round.received, 1u);
    round.marked_fraction += MARKED_GAIN * (round.marked / received - round.marked_fraction);
    double decrease = 0;
    if (round.marked != 0) {
      // The first marks end the start at once. The smoothed fraction alone would take sixteen round trips to rise.
      if (is_starting_) round.marked_fraction = std::max(round.marked_fraction, round.marked / received);
      decrease = round.marked_fraction / 2;
    }
    // The minimum delay of the round shows a standing queue, without this flow's own burst.
    if (round.least_queue_us != NONE && !is_competing_) {
      const auto queue_us = static_cast<double>(round.least_queue_us);
      if (queue_us > target_us()) decrease = std::max(decrease, DELAY_GAIN * (queue_us - target_us()) / queue_us);
    }
    if (decrease > 0) {
      const double share = std::min(decrease, DECREASE_MAX) / std::max(usable_paths, 1u);
      shrink_to(std::max(window_ * (1 - share), competed_ * LOOKING_LEAST));
    }
    round = {.end_us = end_of_round_us(feedback), .marked_fraction = round.marked_fraction};
  }

  void end_round(const PathFeedback& feedback) {
    if (is_competing_) {
      if (round_.lost != 0) look_again();
    } else if (round_.lost >= LOSS_PACKETS && round_.lost > LOSS_FRACTION * (round_.lost + round_.received)) {
      competed_ = 0;
      shrink_to(window_ * (1 - DECREASE_MAX));
    }
    is_draining_ = false;
    if (round_.least_queue_us != NONE) judge_queue(static_cast<double>(round_.least_queue_us));
    round_ = {.end_us = end_of_round_us(feedback)};
  }

  // Whether others fill the queue, and whether the minimum of the round trip can still be believed.
  void judge_queue(double queue_us) {
    if (queue_us <= LONG_QUEUE * target_us()) {
      long_rounds_ = 0;
      is_competing_ = false;
      competed_ = 0;
    } else if (!is_competing_ && ++long_rounds_ >= COMPETE_AFTER_ROUNDS) {
      is_competing_ = true;
      window_ = std::max(window_, competed_);
    }
    if (queue_us < SHORT_QUEUE * target_us_) {
      full_rounds_ = 0;
    } else if (!is_competing_ && !is_starting_ && ++full_rounds_ >= DRAIN_AFTER_ROUNDS) {
      full_rounds_ = 0;
      is_draining_ = true;
    }
  }

  void look_again() {
    is_competing_ = false;
    long_rounds_ = 0;
    competed_ = window_ *= COMPETING_KEPT;
  }

  const double window_max_, target_us_;
  double window_;
  double competed_ = 0;  // the window to return to if the queue stays long. 0: it was short since
  bool is_starting_ = true, is_competing_ = false, is_draining_ = false;
  uint32_t long_rounds_ = 0, full_rounds_ = 0;  // in a row
  Round round_;
  std::vector<PathRound> path_rounds_;
};

}  // namespace

std::unique_ptr<CongestionControl> make_swift(const CongestionLimits& limits) {
  return std::make_unique<Swift>(limits);
}

}  // namespace sennit::flow
