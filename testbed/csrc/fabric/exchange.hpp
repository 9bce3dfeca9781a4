// SPDX-License-Identifier: Apache-2.0
// Ranks, one a host, whose plans run over real flows (flow/flow.hpp), driven as a port drives them.
//
// A connection is a pair of flows between two hosts. It comes with first use. Beyond a number of connections, one that
// is idle ends: a million pairs of flows at once would not fit. A host's NIC takes a batch of packets from each of its
// flows in turn, whenever its link has almost nothing to send.
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
#include "fabric/rank.hpp"
#include "flow/agenda.hpp"
#include "flow/receive_budget.hpp"
#include "ports/exposure.hpp"
#include "ports/flow_lane.hpp"
#include "ports/loan_pool.hpp"

namespace sennit::fabric {

struct ExchangeCounters {
  uint64_t connections, stale_packets;
};

class Exchange final : private Connections {
 public:
  // Throws std::invalid_argument for a configuration out of range.
  Exchange(const TransportConfig& config, uint64_t seed, uint64_t sample_us, Network& network, EventQueue& events);

  // Adds the next rank. Throws PlanError, or std::invalid_argument for a plan of another rank or world.
  void add_rank(std::unique_ptr<Plan> plan, std::span<const uint64_t> counts);
  const std::deque<Rank>& ranks() const { return ranks_; }
  // All ranks post their plans at once. Throws std::invalid_argument if a host has none.
  void start();
  bool is_done() const { return done_ranks_ == hosts_.size(); }

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
  // For each message that needed an advert: time from its first packet's turn until its sender knows that it arrived.
  const std::vector<float>& message_us() const { return message_us_; }
  // For each sample: bytes of messages, and headers of small ones, that arrived for the first time.
  const std::vector<uint64_t>& arrived_bytes() const { return arrived_bytes_; }
  uint64_t trace_hash() const { return trace_hash_; }

 private:
  static constexpr uint64_t NEVER = UINT64_MAX;
  struct Endpoint {
    std::unique_ptr<std::byte[]> eager_memory;  // only headers are written to it
    std::unique_ptr<FlowLane> lane;
    RankLane* above = nullptr;
    uint32_t host = 0, peer = 0;
    uint64_t wake_ps = NEVER;        // when the flow wants to be served
    uint64_t timer_ps = NEVER;       // when the pending timer event comes
    uint64_t checked_ticks = 0;      // the last call of on_timeout
    uint64_t refused_ticks = NEVER;  // when the NIC last asked and got nothing
    bool is_due = false;             // its timer has expired
    bool is_waiting = false;         // in its NIC's list
    bool is_touched = false;
    bool is_idle() const;
  };
  struct Connection {
    uint64_t key = 0;
    uint32_t generation = 0;
    std::array<Endpoint, 2> ends;
  };
  struct Waiting {
    uint32_t endpoint, generation;
  };
  struct Host {
    std::deque<Waiting> waiting;  // flows with something to send
    bool is_timed = false;
    bool is_touched = false;
    std::unique_ptr<flow::ReceiveBudget> budget;
    std::unique_ptr<LoanPool> loans;
  };

  Endpoint& endpoint(uint32_t number) { return connections_[number / 2].ends[number % 2]; }
  uint64_t now_ticks() const { return events_.now_ps() / tick_ps_; }
  void connect(uint32_t rank, uint32_t peer) override;
  void touch(uint32_t endpoint) override;
  void touch_rank(uint32_t rank) override;
  void on_message_us(double time_us) override { message_us_.push_back(static_cast<float>(time_us)); }
  double now_us() const override { return static_cast<double>(events_.now_ps()) / PS_PER_US; }
  uint32_t payload_max_bytes() const override { return config_.flow.payload_max_bytes; }
  void end(uint32_t connection);
  void service(uint32_t endpoint);
  void arm(uint32_t endpoint);
  void pump(uint32_t host);
  size_t send_batch(uint32_t endpoint);
  uint32_t new_packet(uint32_t endpoint, uint32_t path);
  void trace(uint64_t value) { trace_hash_ = (trace_hash_ ^ value) * 0x100'0000'01B3; }  // FNV-1a

  const TransportConfig config_;
  const uint64_t seed_, sample_ps_;
  Network& network_;
  EventQueue& events_;
  const uint64_t tick_ps_, timer_slice_ticks_, nic_ahead_ps_;
  // The clock of all flows. It has one member for all, which is always ready: events say which flow has work.
  flow::Agenda clock_;
  KeysOnly keys_;
  uint64_t keys_given_ = 0;
  // What all plans of all ranks send from and receive into.
  std::unique_ptr<std::byte[]> memory_;
  std::vector<Host> hosts_;
  std::deque<Rank> ranks_;
  size_t done_ranks_ = 0;
  std::deque<Connection> connections_;
  std::vector<uint32_t> free_connections_;
  std::unordered_map<uint64_t, uint32_t> by_key_;
  std::vector<uint32_t> touched_, touched_ranks_;
  ExchangeCounters counters_{};
  flow::FlowCounters ended_counters_{};
  std::string failure_;
  std::vector<float> message_us_;
  std::vector<uint64_t> arrived_bytes_;
  uint64_t trace_hash_ = 0xCBF2'9CE4'8422'2325;
};

}  // namespace sennit::fabric
