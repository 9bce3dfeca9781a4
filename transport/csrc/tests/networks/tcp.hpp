// SPDX-License-Identifier: Apache-2.0
// A TCP flow beside ours on a link of the simulated network: how much it sends, not what.
//
// The window follows CUBIC as it is at the round trips of a data centre, where it keeps to its Reno-friendly estimate
// (RFC 9438, 4.3): after a loss it is 0.7 of what it was, and it grows by 0.53 packets a round trip. Every packet is
// acknowledged by itself, and three later ones condemn it (RFC 6675). There is no ECN, as by default in Linux.
#pragma once
#include <cstdint>
#include <deque>

#include "sim.hpp"

namespace sennit::networks {

class TcpFlow {
 public:
  static constexpr uint64_t PACKET_BYTES = 4'096;

  // Sends without end over `link`. Acknowledgements take `back_us`. It lives as long as the network steps.
  TcpFlow(SimNetwork& network, uint32_t link, uint64_t back_us) : network_(network), link_(link), back_us_(back_us) {}
  void start(uint64_t at_us);

  void stop() { is_stopped_ = true; }

  uint64_t arrived_bytes() const { return arrived_bytes_; }

 private:
  struct Sent {
    uint64_t number;
    bool is_acknowledged;
  };
  void send();
  void on_acknowledged(uint64_t number);
  void on_loss(uint64_t number);
  void watch(uint64_t number);

  SimNetwork& network_;
  const uint32_t link_;
  const uint64_t back_us_;
  std::deque<Sent> in_flight_;  // in order of sending
  uint64_t next_number_ = 0, in_flight_packets_ = 0, arrived_bytes_ = 0;
  uint64_t recover_below_ = 0;  // one reduction a round trip: losses of older packets belong to the last one
  double window_ = 10, slow_start_below_ = 1e9;
  bool is_stopped_ = false;
};

}  // namespace sennit::networks
