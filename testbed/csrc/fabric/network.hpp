// SPDX-License-Identifier: Apache-2.0
// Packets on links: a queue in front of every link with a limit and ECN marks, ECMP at every switch, links that die.
//
// Each packet takes one event per hop. A link is a FIFO, so the time until which it is busy tells the length of its
// queue. A packet that leaves a queue needs no event.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fabric/config.hpp"
#include "fabric/event_queue.hpp"
#include "fabric/routing.hpp"
#include "fabric/topology.hpp"

namespace sennit::fabric {

// Bytes around a data packet's payload: preamble, gap and Ethernet 38, IPv6 40, UDP 8, BTH 12, RETH 16, immediate 4,
// ICRC 4.
inline constexpr uint32_t DATA_OVERHEAD_BYTES = 122;
// Bytes around a control packet's payload: the same without RETH and immediate.
inline constexpr uint32_t CONTROL_OVERHEAD_BYTES = 102;

struct Packet {
  uint64_t tuple;           // hash of the 5-tuple
  uint64_t remote_address;  // for data packets
  uint32_t source, destination;
  uint32_t endpoint, generation;  // the receiving endpoint; a reused number has another generation
  uint32_t wire_bytes, payload_bytes;
  uint32_t immediate, rkey;
  uint32_t link;  // where it travels
  uint16_t path;
  bool is_control, is_marked;
  bool is_urgent;  // waits only for the packet that a link is sending
};

struct LinkCounters {
  uint64_t carried_bytes = 0, dropped_packets = 0;
  uint64_t peak_queue_bytes = 0;
};

struct NetworkCounters {
  uint64_t sent_packets, delivered_packets, queue_dropped_packets, black_holed_packets, marked_packets, hops;
};

class Network {
 public:
  // Throws std::invalid_argument for a configuration out of range.
  Network(const Topology& topology, const LinkConfig& config, uint64_t seed, EventQueue& events);

  uint32_t host_count() const { return topology_.host_count(); }
  uint32_t new_packet();
  void free_packet(uint32_t index) { free_.push_back(index); }
  Packet& packet(uint32_t index) { return packets_[index]; }
  // Returns a control packet's payload. Data packets carry addresses, but no bytes.
  std::vector<std::byte>& payload(uint32_t index) { return payloads_[index]; }
  // Sends a packet from its source. The network frees it if it is lost.
  void send(uint32_t index);
  // Returns the time in which the host's own link empties its queue.
  uint64_t host_backlog_ps(uint32_t host) const;
  // Handles an arrival event. Returns true if the packet is at its destination: then the caller frees it.
  bool arrive(uint32_t index);

  void fail_cables(std::span<const uint32_t> cables);
  // Computes routes over the links that are up.
  void converge() { routing_.compute(is_up_); }
  const Routing& routing() const { return routing_; }

  uint64_t transmit_ps(uint32_t wire_bytes) const { return uint64_t{wire_bytes} * ps_per_kilobyte_ / 1'000; }
  const NetworkCounters& counters() const { return counters_; }
  const std::vector<LinkCounters>& link_counters() const { return link_counters_; }
  uint64_t packets_in_flight() const { return packets_.size() - free_.size(); }

 private:
  void enqueue(uint32_t index, uint32_t link);
  void lose(uint32_t index, uint64_t& counter);
  bool is_marked_at(uint64_t queued_bytes);

  const Topology& topology_;
  const LinkConfig config_;
  const uint64_t ps_per_kilobyte_;
  EventQueue& events_;
  Routing routing_;
  std::vector<bool> is_up_;
  std::vector<uint64_t> busy_until_ps_;
  std::vector<uint64_t> urgent_until_ps_;  // until when a link sends urgent packets
  uint64_t longest_ps_ = 0;                // of a packet on a link
  std::vector<LinkCounters> link_counters_;
  std::vector<Packet> packets_;
  std::vector<std::vector<std::byte>> payloads_;
  std::vector<uint32_t> free_;
  NetworkCounters counters_{};
  uint64_t random_;
};

}  // namespace sennit::fabric
