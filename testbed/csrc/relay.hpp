// SPDX-License-Identifier: Apache-2.0
// Keeps each packet of one packet socket for a while and sends it by another: the delays of the testbed.
//
// testbed/topology/relay.py makes the sockets and says what they are for. Packets carry a virtio_net_hdr in front.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "delay_queue.hpp"

namespace sennit {

// Memory that the relay shares with the process that started it (testbed/topology/relay_table.py).
struct RelayTable {
  uint64_t received, sent, lost, overrun;
  uint64_t late_ns;             // the sum over all packets sent
  uint64_t delay_us[256][256];  // of what a host sends on a plane: [plane][host]
};

class Relay {
 public:
  // `inlet` yields packets that are to be delayed, with their time of arrival (SO_TIMESTAMPNS). `outlet` is bound to no
  // interface. Neither blocks. A packet for plane p and host h leaves by the interface with the index
  // first_port + p * ports_a_plane + h. The relay ends when `stop` can be read. All of them stay the caller's. Throws
  // std::system_error if the table cannot be mapped.
  Relay(int inlet, int outlet, int table, int stop, uint32_t first_port, uint32_t ports_a_plane);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  // Throws std::system_error if a socket fails for another reason than a port that is down or full.
  void run();

 private:
  // Whether there was a packet.
  bool receive();
  void send_due();
  void read_statistics(uint64_t now_ns);
  bool wait(uint64_t now_ns);

  const int inlet_, outlet_, stop_;
  const uint32_t first_port_, ports_a_plane_;
  RelayTable* table_;
  DelayQueue queue_;
  uint64_t came_ns_ = 0;  // when the newest packet came
  uint64_t statistics_due_ns_ = 0;
};

}  // namespace sennit
