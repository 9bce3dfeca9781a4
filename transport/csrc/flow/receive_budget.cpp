// SPDX-License-Identifier: Apache-2.0
#include "flow/receive_budget.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace sennit::flow {
namespace {

constexpr double MARKED_GAIN = 1.0 / 16;  // RFC 8257, 3.3: g
constexpr double DELAY_GAIN = 0.8;        // Swift's beta
constexpr double DECREASE_MAX = 0.5;      // a round
// A quarter: what the last hop's queue must be able to take before its delay is noticed.
constexpr double FAST_GROWTH = 1.25;
constexpr uint32_t GOOD_ROUNDS = 2;
constexpr double INCREASE_BYTES = 16'384;  // a round, after the start

}  // namespace

ReceiveBudget::ReceiveBudget(const ReceiveBudgetConfig& config)
    : config_(config), bytes_(static_cast<double>(config.start_bytes)) {
  if (config.min_bytes == 0 || config.min_bytes > config.start_bytes || config.start_bytes > config.max_bytes)
    throw std::invalid_argument("receive budget must have 0 < min_bytes <= start_bytes <= max_bytes, not " +
                                std::to_string(config.min_bytes) + ", " + std::to_string(config.start_bytes) + ", " +
                                std::to_string(config.max_bytes));
}

uint64_t ReceiveBudget::share_bytes() const { return bytes() / std::max(expecting_flows_, 1u); }

void ReceiveBudget::on_arrival(uint32_t bytes, bool ecn_marked) {
  round_bytes_ += bytes;
  if (ecn_marked) round_marked_bytes_ += bytes;
  if (round_bytes_ >= this->bytes()) end_round();
}

void ReceiveBudget::on_queue_report(uint64_t queue_us) {
  round_queue_us_ = std::max(round_queue_us_, queue_us);
  is_reported_ = true;
}

void ReceiveBudget::end_round() {
  const double marked = static_cast<double>(round_marked_bytes_) / static_cast<double>(round_bytes_);
  marked_fraction_ += MARKED_GAIN * (marked - marked_fraction_);
  if (is_starting_) marked_fraction_ = marked;
  double decrease = round_marked_bytes_ != 0 ? marked_fraction_ / 2 : 0;
  if (round_queue_us_ > config_.target_queue_us) {
    const auto queue_us = static_cast<double>(round_queue_us_);
    decrease = std::max(decrease, DELAY_GAIN * (queue_us - static_cast<double>(config_.target_queue_us)) / queue_us);
  }
  if (decrease > 0) {
    good_rounds_ = 0;
    is_starting_ = false;
    bytes_ *= 1 - std::min(decrease, DECREASE_MAX);
  } else if (is_reported_ && ++good_rounds_ >= GOOD_ROUNDS) {
    good_rounds_ = 0;
    // Far from the target: what shrank us is gone, or was a host that paused.
    const bool is_empty = round_queue_us_ <= config_.target_queue_us / 4;
    bytes_ = is_starting_ || is_empty ? FAST_GROWTH * bytes_ : bytes_ + INCREASE_BYTES;
  }
  bytes_ = std::clamp(bytes_, static_cast<double>(config_.min_bytes), static_cast<double>(config_.max_bytes));
  round_bytes_ = round_marked_bytes_ = round_queue_us_ = 0;
  is_reported_ = false;
}

}  // namespace sennit::flow
