// SPDX-License-Identifier: Apache-2.0
// One rank of a schedule: a program that sends and receives its messages, and the port that drives its flow. Every
// answer of the flow is compared with what the model knows.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "flow/flow.hpp"
#include "model/direction.hpp"
#include "model/network.hpp"
#include "model/schedule.hpp"

namespace sennit::model {

class Rank {
 public:
  explicit Rank(uint32_t index);
  // `outgoing` are the messages it sends, `incoming` those it receives.
  void begin(const Schedule& schedule, Network& network, Direction& outgoing, Direction& incoming, bool is_verbose);
  void introduce(const Rank& peer);
  // Ends the flow, which must have returned everything that it took from the receive budget.
  void end();
  std::byte* eager_memory() { return eager_memory_.data(); }
  uint32_t eager_rkey() const;

  // `age_packets`: how many data packets of its kind (eager or bulk) its sender has given out since.
  void deliver(const Packet& packet, uint64_t age_packets);
  // The number of the next packet of this kind.
  uint64_t& order_of(const Packet& packet);
  // One round of the port: timer, events, the program's next calls, packets.
  void round(bool has_read_all);
  uint64_t wake_us() const { return wake_us_; }
  void woken() { wake_us_ = NEVER; }

  void abort(const char* reason);
  void close();
  void notice_peer_failed();
  void die() { is_dead_ = true; }

  // Whether all messages of both directions are complete for this side.
  bool is_complete() const;
  bool has_ended() const { return has_ended_; }
  bool is_lost() const { return is_lost_; }  // or told by its peer
  bool is_told() const { return is_told_; }
  bool is_aborted() const { return has_ended() && !is_lost_; }
  bool is_dead() const { return is_dead_; }
  bool is_closed() const { return is_closed_; }
  const std::string& end_reason() const { return end_reason_; }
  std::string_view flow_end_reason() const { return flow_->end_reason(); }
  // Whether it must notice a peer that falls silent: its program waits, or it is in the middle of a message of one
  // credit, judged by what was seen on the wire.
  bool needs_peer() const;
  // The last time when it did not need its peer, heard from it, or was asleep.
  uint64_t last_excuse_us() const { return last_excuse_us_; }
  void excuse() { last_excuse_us_ = network_->now_us(); }
  void check_counters(const Rank& peer) const;
  std::string describe() const;

 private:
  uint64_t clock_us() const { return network_->now_us() + draw_->clock_us; }
  const RankDraw& draw() const { return *draw_; }
  bool happens(uint32_t chance) { return (random_.next() & 0xFFFF) < chance; }
  void place(const Packet& packet, uint64_t age_packets);
  void scribble();
  void poll_events();
  void on_event(const flow::Event& event);
  void on_end(const flow::Event& event);
  void send_eager_messages();
  void advertise();
  void transfer();
  bool send_packets();
  void set_wake();
  bool is_waiting() const { return draw().waits && !has_ended() && !is_complete(); }
  uint64_t look_us() const;
  uint64_t next_post_us() const;
  void say(const char* format, ...) const __attribute__((format(printf, 2, 3)));

  const uint32_t index_;
  const Schedule* schedule_ = nullptr;
  const RankDraw* draw_ = nullptr;
  Network* network_ = nullptr;
  Direction* outgoing_ = nullptr;
  Direction* incoming_ = nullptr;
  bool is_verbose_ = false;
  SimRandom random_{0};
  std::vector<std::byte> eager_memory_;
  std::optional<flow::ReceiveBudget> budget_;
  std::optional<flow::Flow> flow_;

  uint64_t wake_us_ = NEVER;
  uint32_t idle_wakes_ = 0, immediate_rounds_ = 0;
  std::string end_reason_;
  bool has_ended_ = false, is_lost_ = false, is_told_ = false, is_dead_ = false, is_closed_ = false,
       has_deferred_ = false;
  uint64_t last_heard_us_ = 0, last_excuse_us_ = 0;

  // The program: the next message of each kind, both ways, and the adverts by message.
  uint32_t next_eager_out_ = 0, next_eager_in_ = 0, next_advert_ = 0, next_bulk_out_ = 0;
  uint32_t open_receives_ = 0, sent_ = 0, received_ = 0, eager_out_ = 0, eager_in_ = 0;
  uint32_t waiting_transfers_ = 0;
  std::array<uint64_t, MESSAGES_MAX> advert_ids_{};
  std::array<bool, MESSAGES_MAX> transferred_{};

  std::array<uint64_t, 2> orders_{};  // bulk, eager
  struct {
    uint64_t data_out, control_out, control_in, placed, duplicate, marked, unknown, after_end;
  } seen_{};
};

}  // namespace sennit::model
