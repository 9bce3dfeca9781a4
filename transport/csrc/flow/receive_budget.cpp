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
// The budget grows by a quarter: the last hop's queue must be able to take this much before its delay is noticed.
constexpr double FAST_GROWTH = 1.25;
constexpr uint32_t GOOD_ROUNDS = 2;
constexpr double INCREASE_BYTES = 16'384;  // a round, after the start
// Longer than the largest budget takes at 10 Gbit/s, so that even then the reports belong to the round before.
constexpr uint64_t ROUND_MAX_US = 4'000;
// A flow is idle if several looks found it so. One look may follow a pause of this host, and then nobody was late.
constexpr uint64_t LOOK_US = 250;
constexpr uint64_t IDLE_LOOKS = 4;

}  // namespace

ReceiveBudget::ReceiveBudget(const ReceiveBudgetConfig& config)
    : config_(config), bytes_(static_cast<double>(config.start_bytes)) {
  if (config.min_bytes == 0 || config.min_bytes > config.start_bytes || config.start_bytes > config.max_bytes)
    throw std::invalid_argument("receive budget must have 0 < min_bytes <= start_bytes <= max_bytes, not " +
                                std::to_string(config.min_bytes) + ", " + std::to_string(config.start_bytes) + ", " +
                                std::to_string(config.max_bytes));
}

uint64_t ReceiveBudget::share_bytes() const { return bytes() / std::max(expecting_flows() - parked_flows_, 1u); }

void ReceiveBudget::on_expecting(Account& account, bool expects) {
  ++share_version_;
  if (expects) {
    account.index = accounts_.size();
    accounts_.push_back(&account);
    return;
  }
  accounts_[account.index] = accounts_.back();
  accounts_[account.index]->index = account.index;
  accounts_.pop_back();
}

void ReceiveBudget::on_granted(Account& account, uint64_t now_us, uint64_t bytes, uint64_t wanted_bytes) {
  is_short_ |= bytes < wanted_bytes;
  if (bytes == 0) return;
  account.granted_bytes += bytes;
  granted_bytes_ += bytes;
  touch(account, now_us);
}

void ReceiveBudget::on_arrival(Account& account, uint64_t now_us, uint32_t bytes, bool ecn_marked) {
  if (account.is_parked) readmit(account);
  touch(account, now_us);
  look(now_us);
  arrived_bytes_ += bytes;
  if (round_bytes_ == 0) round_began_us_ = now_us;
  round_bytes_ += bytes;
  if (ecn_marked) round_marked_bytes_ += bytes;
  const bool is_full = round_bytes_ >= this->bytes();
  if (is_full || now_us >= round_began_us_ + ROUND_MAX_US) end_round(is_full);
}

void ReceiveBudget::on_settled(Account& account, uint64_t bytes) {
  if (account.is_parked) readmit(account);
  account.granted_bytes -= bytes;
  granted_bytes_ -= bytes;
}

void ReceiveBudget::touch(Account& account, uint64_t now_us) const {
  account.touched_us = now_us;
  account.touched_look = looks_;
  account.behind_bytes = arrived_bytes_ + granted_bytes_ - (account.granted_bytes - account.parked_bytes);
}

void ReceiveBudget::look(uint64_t now_us) {
  if (now_us < look_at_us_) return;
  look_at_us_ = now_us + LOOK_US;
  ++looks_;
  for (Account* const account : accounts_)
    if (account->granted_bytes != 0 && looks_ >= account->touched_look + IDLE_LOOKS &&
        now_us >= account->touched_us + account->idle_us && arrived_bytes_ >= account->behind_bytes)
      park(*account);
}

// Several flows may hold a whole budget each, one after the other. Together no more than one largest budget is parked.
void ReceiveBudget::park(Account& account) {
  const uint64_t bytes = std::min(account.granted_bytes - account.parked_bytes, config_.max_bytes - parked_bytes_);
  account.parked_bytes += bytes;
  parked_bytes_ += bytes;
  granted_bytes_ -= bytes;
  if (account.is_parked) return;
  account.is_parked = true;
  ++parked_flows_;
  ++share_version_;
}

void ReceiveBudget::readmit(Account& account) {
  granted_bytes_ += account.parked_bytes;
  parked_bytes_ -= account.parked_bytes;
  account.parked_bytes = 0;
  account.is_parked = false;
  --parked_flows_;
  ++share_version_;
}

void ReceiveBudget::on_queue_report(uint64_t queue_us) {
  round_queue_us_ = std::max(round_queue_us_, queue_us);
  is_reported_ = true;
}

void ReceiveBudget::end_round(bool is_full) {
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
  } else if (is_reported_ && (is_full || is_short_) && ++good_rounds_ >= GOOD_ROUNDS) {
    // A budget that nobody needed was not tested.
    good_rounds_ = 0;
    // Far from the target: the reason for shrinking is gone, or was only a host that paused.
    const bool is_empty = round_queue_us_ <= config_.target_queue_us / 4;
    bytes_ = is_starting_ || is_empty ? FAST_GROWTH * bytes_ : bytes_ + INCREASE_BYTES;
  }
  bytes_ = std::clamp(bytes_, static_cast<double>(config_.min_bytes), static_cast<double>(config_.max_bytes));
  ++share_version_;
  round_bytes_ = round_marked_bytes_ = round_queue_us_ = 0;
  is_reported_ = is_short_ = false;
}

}  // namespace sennit::flow
