// SPDX-License-Identifier: Apache-2.0
// A window that follows ECN marks and overflowing queues, and leaves delay to the receiver (ReceiveBudget).
//
// ECN as in DCTCP (RFC 8257): once in a round-trip time the window decreases by half the smoothed fraction of marked
// packets. Loss of much of a round trip halves the window. Single losses do not, because a packet is lost by accident,
// too: a path that loses one packet in twenty still carries nearly its rate. So what happens where no queue overflows
// and nothing is marked is the same as with a fixed window.
#include <algorithm>

#include "flow/congestion.hpp"

namespace sennit::flow {
namespace {

constexpr double WINDOW_MIN_PACKETS = 2;
// A round trip. Large windows grow faster, small ones slower: they may be those of many flows.
constexpr double INCREASE_FRACTION = 1.0 / 16, INCREASE_MIN_PACKETS = 1;
constexpr double MARKED_GAIN = 1.0 / 16;  // RFC 8257, 3.3: g
// A fifth of the packets in a round-trip time: a queue overflowed. Two, because windows may be small.
constexpr double LOSS_FRACTION = 0.2;
constexpr uint32_t LOSS_PACKETS = 2;
constexpr double LOSS_DECREASE = 0.5;
constexpr uint64_t ROUND_MIN_US = 20;

class Dctcp final : public CongestionControl {
 public:
  // Begins with the largest window. The first grant of the receiver limits what is sent before anything is known.
  explicit Dctcp(const CongestionLimits& limits)
      : window_max_(limits.window_max_packets), window_(limits.window_max_packets) {}
  std::string_view name() const override { return "dctcp"; }
  uint32_t window_packets() const override { return static_cast<uint32_t>(window_); }
  bool paces() const override { return window_ < window_max_ / 2; }

  void on_feedback(const PathFeedback& feedback, uint32_t, uint32_t in_flight_packets) override {
    received_ += feedback.received_packets;
    marked_ += feedback.marked_packets;
    // If the program does not fill the window, success does not show that a larger window would work.
    const bool is_filled = in_flight_packets + feedback.received_packets >= window_ / 2;
    if (is_filled && feedback.marked_packets == 0)
      window_ += std::max(window_ * INCREASE_FRACTION, INCREASE_MIN_PACKETS) * feedback.received_packets / window_;
    if (feedback.now_us >= end_us_) end_round(feedback);
    window_ = std::clamp(window_, std::min(WINDOW_MIN_PACKETS, window_max_), window_max_);
  }

  void on_losses(uint64_t, uint32_t, uint32_t packets) override { lost_ += packets; }

 private:
  void end_round(const PathFeedback& feedback) {
    marked_fraction_ += MARKED_GAIN * (marked_ / static_cast<double>(std::max(received_, 1u)) - marked_fraction_);
    double decrease = marked_ != 0 ? marked_fraction_ / 2 : 0;
    if (lost_ >= LOSS_PACKETS && lost_ > LOSS_FRACTION * (lost_ + received_)) decrease = LOSS_DECREASE;
    window_ *= 1 - decrease;
    received_ = marked_ = lost_ = 0;
    end_us_ = feedback.now_us + std::max({feedback.fabric_us, feedback.fabric_min_us, ROUND_MIN_US});
  }

  const double window_max_;
  double window_;
  double marked_fraction_ = 1;  // smoothed; RFC 8257, 3.3: the first marks halve the window
  uint64_t end_us_ = 0;
  uint32_t received_ = 0, marked_ = 0, lost_ = 0;  // in this round
};

}  // namespace

std::unique_ptr<CongestionControl> make_dctcp(const CongestionLimits& limits) {
  return std::make_unique<Dctcp>(limits);
}

}  // namespace sennit::flow
