// SPDX-License-Identifier: Apache-2.0
// The network between the two ranks: packets in flight, in virtual time.
//
// It encodes no bytes, because a million schedules must take only a minute. A packet is what the flow gave out, plus
// what the model knows of it. (sim.hpp is the network that encodes every packet.)
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "flow/flow.hpp"
#include "model/schedule.hpp"
#include "sim.hpp"

namespace sennit::model {

// Larger than any control payload, which holds at most max(payload, 1,024) bytes.
inline constexpr size_t BODY_MAX_BYTES = 1'024;

struct Packet {
  flow::DataOut data;  // without the payload's address; control: only its size
  uint32_t path;
  uint16_t message, part;  // data: of the sender's messages, which packet of it
  bool is_control, is_marked;
  uint64_t order;  // data: running number among its kind (eager or bulk)
  std::array<std::byte, BODY_MAX_BYTES> body;
};

struct Happening {
  uint64_t at_ns;
  uint32_t order;
  uint16_t packet;  // or NO_PACKET: the rank's own wake, SUMMONS: a round whatever its timer says
  uint8_t rank;
  bool operator>(const Happening& other) const {
    return at_ns != other.at_ns ? at_ns > other.at_ns : order > other.order;
  }
};

struct NetworkCounters {
  uint64_t sent, lost, queue_drops, marked, corrupted, duplicated, delivered;
};

class Network {
 public:
  static constexpr uint16_t NO_PACKET = UINT16_MAX, SUMMONS = UINT16_MAX - 1;
  // More packets in flight than this are a flood in any schedule.
  static constexpr uint16_t PACKETS_MAX = 16'384;

  Network();
  void begin(const Schedule& schedule);

  uint64_t now_us() const { return now_us_; }
  Packet* new_packet();  // null: too many in flight
  // Decides the packet's fate. `packet` came from new_packet.
  void transmit(uint32_t rank, Packet& packet);
  void wake(uint64_t at_us, uint32_t rank) { push(at_us * 1'000, rank, NO_PACKET); }
  void summon(uint64_t at_us, uint32_t rank) { push(at_us * 1'000, rank, SUMMONS); }
  // The rank cannot look yet. Later it empties the sockets of its rails one after the other, and acts in between.
  void postpone(const Happening& happening, uint64_t until_us) {
    const uint64_t rail = happening.packet == SUMMONS ? schedule_->config.rail_count
                                                      : packets_[happening.packet].path % schedule_->config.rail_count;
    push(until_us * 1'000 + rail, happening.rank, happening.packet);
  }

  // The rank has more to read now, before `until_ns`.
  bool has_arrivals(uint32_t rank, uint64_t until_ns) const {
    return !happenings_.empty() && peek().at_ns < until_ns && peek().rank == rank && peek().packet < PACKETS_MAX;
  }
  bool empty() const { return happenings_.empty(); }
  const Happening& peek() const { return happenings_.front(); }
  Happening next();
  Packet& packet(uint16_t index) { return packets_[index]; }
  void free_packet(uint16_t index) { free_.push_back(index); }
  const NetworkCounters& counters() const { return counters_; }

 private:
  struct LinkState {
    uint64_t busy_until_ns;
    uint32_t burst_left;
  };
  void push(uint64_t at_ns, uint32_t rank, uint16_t packet);
  bool is_black_hole(uint32_t rank, uint32_t path) const;
  bool happens(uint32_t chance) { return (random_.next() & 0xFFFF) < chance; }

  const Schedule* schedule_ = nullptr;
  SimRandom random_{0};
  std::unique_ptr<Packet[]> packets_;
  std::vector<uint16_t> free_;
  std::vector<Happening> happenings_;  // a heap
  std::array<std::array<LinkState, PATHS_MAX>, 2> links_;
  uint64_t now_us_ = 0;
  uint32_t order_ = 0;
  NetworkCounters counters_{};
};

}  // namespace sennit::model
