// SPDX-License-Identifier: Apache-2.0
// The network between ranks of different hosts, in virtual time, and a rank's end of a lane over it.
//
// As in tests/model/network.hpp, a packet is what the flow gave out. Packets of one path stay in order. Some are lost.
#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string_view>
#include <vector>

#include "model/exchange/schedule.hpp"
#include "ports/flow_lane.hpp"
#include "sim.hpp"

namespace sennit::model::exchange {

struct Packet {
  uint64_t at_us;
  uint32_t path;
  bool is_control;
  flow::DataOut data;            // without the payload
  std::vector<std::byte> bytes;  // the payload, or the control
};

class Network {
 public:
  void begin(const Schedule& schedule);
  void send(uint32_t from, uint32_t to, uint64_t now_us, Packet packet);
  // The next packet that has arrived. False: there is none.
  bool receive(uint32_t from, uint32_t to, uint64_t now_us, Packet& out);

 private:
  struct Link {
    uint64_t last_us = 0;
    std::deque<Packet> packets;
  };
  Link& link(uint32_t from, uint32_t to, uint32_t path) { return links_[(from * RANKS_MAX + to) * PATHS_MAX + path]; }

  NetworkSettings settings_{};
  SimRandom random_{0};
  uint32_t losses_left_ = 0;
  std::vector<Link> links_;
};

// The lane to a rank of another host: a port's part of it, in place of sockets.
class Remote {
 public:
  Remote(const Schedule& schedule, uint32_t rank, uint32_t peer, Network& network, Exposure& exposure, LoanPool& loans,
         LaneSink& sink);

  FlowLane& lane() { return lane_; }
  void introduce(const Remote& other);
  // One round. True when a message got on. After the end it only answers.
  bool drive(uint64_t now_us);
  // The last words leave at once.
  void abort(std::string_view reason);
  void leave();

 private:
  void send(uint64_t now_us);

  const uint32_t rank_, peer_;
  Network& network_;
  std::vector<std::byte> eager_memory_;
  FlowLane lane_;
  uint64_t now_us_ = 0;
};

}  // namespace sennit::model::exchange
