// SPDX-License-Identifier: Apache-2.0
// Hosts that exchange messages over real flows (flow/flow.hpp), driven as a port drives them.
//
// A connection carries messages one way between two hosts over a pair of flows. It is made when the two hosts start
// to talk and ended when they are done, unless the workload keeps it. A million pairs of flows at once would not fit.
// A host's NIC takes a batch of packets from each of its flows in turn, whenever its link has almost nothing to send.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fabric/config.hpp"
#include "fabric/network.hpp"
#include "flow/sequence_ring.hpp"

namespace sennit::fabric {

struct Message {
  uint32_t from, to;
  uint64_t number;  // chosen by the workload
  uint64_t size_bytes;
};

class Exchange;

class Workload {
 public:
  virtual ~Workload() = default;
  virtual void start(Exchange& exchange) = 0;
  virtual void on_received(Exchange& exchange, const Message& message) = 0;
  virtual bool is_done() const = 0;
  // Whether the same pairs talk all the time.
  virtual bool keeps_connections() const = 0;
  virtual uint64_t message_max_bytes() const = 0;
};

struct ExchangeCounters {
  uint64_t connections, messages, message_bytes, stale_packets;
};

class Exchange {
 public:
  // Throws std::invalid_argument for a configuration out of range.
  Exchange(const TransportConfig& config, uint64_t seed, uint64_t sample_us, Network& network, EventQueue& events,
           Workload& workload);

  // The workload calls each of these once for every message. A message travels when its receiver has posted it and its
  // sender has it ready.
  void post(const Message& message);
  void ready(const Message& message);

  // Handle the events that do not belong to the network. Call settle() after any of them.
  void deliver(uint32_t packet);
  void on_nic(uint32_t host);
  void on_timer(uint32_t endpoint);
  // Services all touched endpoints until none is touched.
  void settle();

  const ExchangeCounters& counters() const { return counters_; }
  flow::FlowCounters flow_counters() const;
  // Why a flow gave its peer up; empty if none did.
  const std::string& failure() const { return failure_; }
  // For each message: time from posting to arrival.
  const std::vector<float>& message_us() const { return message_us_; }
  // For each sample: payload bytes that arrived for the first time.
  const std::vector<uint64_t>& arrived_bytes() const { return arrived_bytes_; }
  uint64_t trace_hash() const { return trace_hash_; }

 private:
  static constexpr uint64_t NEVER = UINT64_MAX;
  struct Endpoint {
    std::unique_ptr<flow::Flow> flow;
    uint32_t host = 0, peer = 0;
    uint64_t wake_ps = NEVER;        // when the flow wants to be served
    uint64_t timer_ps = NEVER;       // when the pending timer event comes
    uint64_t checked_ticks = 0;      // the last call of on_timeout
    uint64_t refused_ticks = NEVER;  // when the NIC last asked and got nothing
    bool is_due = false;             // its timer has expired
    bool is_waiting = false;         // in its NIC's list
    bool is_touched = false;
  };
  struct Posted {
    Message message;
    uint64_t at_ps;
    bool is_received;
  };
  struct Advert {
    uint64_t number, id;
  };
  struct Connection {
    uint64_t key = 0;
    uint32_t generation = 0;
    std::array<Endpoint, 2> ends;  // sender, receiver
    flow::SequenceRing<Posted> posted;
    std::vector<Message> ready;   // ready, but not advertised yet
    std::vector<Advert> adverts;  // for messages that are not ready yet
    uint64_t posted_count = 0, ready_count = 0, received_count = 0, sent_count = 0;
  };
  struct Waiting {
    uint32_t endpoint, generation;
  };
  struct Host {
    std::deque<Waiting> waiting;  // flows with something to send
    bool is_timed = false;
  };

  Endpoint& endpoint(uint32_t number) { return connections_[number / 2].ends[number % 2]; }
  uint64_t now_ticks() const { return events_.now_ps() / tick_ps_; }
  uint32_t connect(const Message& message);
  void end(uint32_t connection);
  void on_advert(uint32_t connection, const Advert& advert);
  void transfer(uint32_t connection, const Message& message, uint64_t advert_id);
  void touch(uint32_t endpoint);
  void service(uint32_t endpoint);
  void on_event(uint32_t endpoint, const flow::Event& event);
  void arm(uint32_t endpoint);
  void pump(uint32_t host);
  uint32_t new_packet(uint32_t endpoint, uint32_t path);
  void trace(uint64_t value) { trace_hash_ = (trace_hash_ ^ value) * 0x100'0000'01B3; }  // FNV-1a

  const TransportConfig config_;
  const uint64_t seed_, sample_ps_;
  Network& network_;
  EventQueue& events_;
  Workload& workload_;
  const uint64_t tick_ps_, timer_slice_ticks_, nic_ahead_ps_;
  std::vector<std::byte> eager_memory_;
  // The address that messages are sent from and placed into. No byte of it is touched.
  std::unique_ptr<std::byte[]> memory_;
  std::vector<Host> hosts_;
  std::deque<Connection> connections_;
  std::vector<uint32_t> free_connections_;
  std::unordered_map<uint64_t, uint32_t> by_key_;
  std::vector<uint32_t> touched_;
  ExchangeCounters counters_{};
  flow::FlowCounters ended_counters_{};
  std::string failure_;
  std::vector<float> message_us_;
  std::vector<uint64_t> arrived_bytes_;
  uint64_t trace_hash_ = 0xCBF2'9CE4'8422'2325;
};

}  // namespace sennit::fabric
