// SPDX-License-Identifier: Apache-2.0
#include "networks/tcp.hpp"

#include <algorithm>

namespace sennit::networks {
namespace {

constexpr double DECREASE = 0.7;                                  // RFC 9438, 4.6: beta
constexpr double INCREASE = 3 * (1 - DECREASE) / (1 + DECREASE);  // 4.3: alpha, packets a round trip
constexpr uint64_t DUPLICATE_THRESHOLD = 3;                       // RFC 6675
constexpr uint64_t TIMEOUT_US = 200'000;                          // Linux: TCP_RTO_MIN
constexpr double WINDOW_MIN_PACKETS = 2;

}  // namespace

void TcpFlow::start(uint64_t at_us) {
  network_.call_at(at_us, [this] { send(); });
}

void TcpFlow::send() {
  while (!is_stopped_ && static_cast<double>(in_flight_packets_) < window_) {
    const uint64_t number = next_number_++;
    in_flight_.push_back({number, false});
    ++in_flight_packets_;
    if (const auto at_us = network_.carry(link_, PACKET_BYTES))
      network_.call_at(*at_us + back_us_, [this, number] { on_acknowledged(number); });
    network_.call_at(network_.now_us() + TIMEOUT_US, [this, number] { watch(number); });
  }
}

void TcpFlow::on_acknowledged(uint64_t number) {
  arrived_bytes_ += PACKET_BYTES;
  const auto at = std::ranges::lower_bound(in_flight_, number, {}, &Sent::number);
  if (at == in_flight_.end() || at->number != number || at->is_acknowledged) return;
  at->is_acknowledged = true;
  --in_flight_packets_;
  window_ += window_ < slow_start_below_ ? 1 : INCREASE / window_;
  while (!in_flight_.empty()) {
    const Sent oldest = in_flight_.front();
    if (!oldest.is_acknowledged) {
      if (oldest.number + DUPLICATE_THRESHOLD > number) break;
      on_loss(oldest.number);
      --in_flight_packets_;
    }
    in_flight_.pop_front();
  }
  send();
}

void TcpFlow::on_loss(uint64_t number) {
  if (number < recover_below_) return;
  recover_below_ = next_number_;
  slow_start_below_ = window_ = std::max(window_ * DECREASE, WINDOW_MIN_PACKETS);
}

// Nothing acknowledged that was sent later: all of it is lost (RFC 6298, 5).
void TcpFlow::watch(uint64_t number) {
  if (in_flight_.empty() || in_flight_.front().number != number) return;
  in_flight_.clear();
  in_flight_packets_ = 0;
  recover_below_ = next_number_;
  slow_start_below_ = std::max(window_ / 2, WINDOW_MIN_PACKETS);
  window_ = 1;
  send();
}

}  // namespace sennit::networks
