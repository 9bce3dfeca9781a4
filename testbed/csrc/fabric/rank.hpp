// SPDX-License-Identifier: Apache-2.0
// A simulated rank: the real mailbox and the real executor run its plan, over lanes into the fabric.
//
// Messages have lengths and no bytes. All buffers of all plans are one piece of memory that nobody looks into, and
// folds do nothing. Left out is the engine around the operation, which is about threads, sleep and deadlines.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "executor/operation.hpp"
#include "executor/plan.hpp"
#include "ports/flow_lane.hpp"

namespace sennit::fabric {

class Rank;

// The connections of all ranks, as a lane needs them.
class Connections {
 public:
  virtual ~Connections() = default;
  // Makes the connection between two ranks unless there is one. It sets the lanes' bases at both ends.
  virtual void connect(uint32_t rank, uint32_t peer) = 0;
  // The end of a connection has something to do.
  virtual void touch(uint32_t endpoint) = 0;
  virtual void touch_rank(uint32_t rank) = 0;
  virtual void on_message_us(double time_us) = 0;
  virtual double now_us() const = 0;
  virtual uint32_t payload_max_bytes() const = 0;
};

// A rank's lane to one peer, between the mailbox and the lane over a flow. That one comes with first use, and goes when
// its connection is idle and others need the memory.
class RankLane final : public Lane, public LaneSink {
 public:
  RankLane(Connections& connections, Mailbox& mailbox, uint32_t rank, uint32_t peer)
      : connections_(connections), mailbox_(mailbox), rank_(rank), peer_(peer) {}

  void set_base(FlowLane* base, uint32_t endpoint) {
    base_ = base;
    endpoint_ = endpoint;
  }
  // Whether the mailbox expects nothing more of the lane below than what it will ask for.
  bool is_idle() const { return open_receives_.empty() && loans_ == 0 && transfers_.empty() && !is_deferred_; }
  uint64_t received_messages() const { return received_messages_; }
  uint64_t received_bytes() const { return received_bytes_; }

  uint64_t eager_max_bytes() const override { return connections_.payload_max_bytes() - flow::EAGER_HEADER_BYTES; }
  [[nodiscard]] bool send_eager(const MessageHeader& header, uint32_t flags, const void* data) override;
  void advertise(uint64_t receive_id, const MessageHeader& header, void* destination) override;
  using Lane::transfer;
  void transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes, Use how) override;
  bool release(uint64_t loan_id) override;
  // All ranks live.
  void expect(uint64_t) override {}
  uint64_t heard_us() const override { return base_ == nullptr ? 0 : base_->heard_us(); }
  uint64_t silent_us() const override { return base_ == nullptr ? 0 : base_->silent_us(); }
  std::string describe() const override { return base_ == nullptr ? "not connected" : base_->describe(); }

  bool on_eager(uint32_t peer, const MessageHeader& header, uint32_t flags, const std::byte* data) override;
  void on_advert(uint32_t peer, const MessageHeader& header, uint64_t advert_id) override;
  void on_received(uint64_t receive_id, const std::byte* data, uint64_t loan_id) override;
  void on_sent(uint64_t send_id) override;
  void on_peer_lost(uint32_t peer, std::string reason) override;

 private:
  struct OpenReceive {
    uint64_t id, size_bytes;
  };
  struct Transfer {
    uint64_t id;
    double began_us;
  };
  void use();
  void count(uint64_t size_bytes) {
    ++received_messages_;
    received_bytes_ += size_bytes;
  }

  Connections& connections_;
  Mailbox& mailbox_;
  FlowLane* base_ = nullptr;
  const uint32_t rank_, peer_;
  uint32_t endpoint_ = 0;
  uint32_t loans_ = 0;
  bool is_deferred_ = false;  // the mailbox had no room for a small message
  bool is_blocked_ = false;   // the flow had no room for one
  std::vector<OpenReceive> open_receives_;
  std::vector<Transfer> transfers_;
  uint64_t received_messages_ = 0, received_bytes_ = 0;
};

struct Sent {
  uint64_t messages = 0, bytes = 0;
};

class Rank final : public OperationHost {
 public:
  // `counts`: of a plan that takes counts. Throws PlanError for a plan that cannot run, std::invalid_argument for one
  // on device memory.
  Rank(Connections& connections, std::unique_ptr<Plan> plan, std::span<const uint64_t> counts);
  ~Rank();

  // Bytes of the largest buffer that its plan uses.
  uint64_t memory_bytes() const;
  // What its plan sends to each peer.
  const std::unordered_map<uint32_t, Sent>& sent() const { return sent_; }
  RankLane* lane(uint32_t peer) { return lanes_.at(peer).get(); }
  const std::unordered_map<uint32_t, std::unique_ptr<RankLane>>& lanes() const { return lanes_; }

  void post(std::byte* memory);
  // Runs what is ready. True if the plan just finished.
  bool run(uint64_t now_ticks);
  // Why it cannot go on; empty while it can.
  std::string failure();

  bool may_send(const Operation&) const override { return true; }
  void retain() override {}
  void release() override {}

 private:
  Plan* const plan_;  // holds a reference
  std::shared_ptr<const RunSizes> sizes_;
  std::unordered_map<uint32_t, Sent> sent_;
  std::unordered_map<uint32_t, std::unique_ptr<RankLane>> lanes_;
  Operation* operation_ = nullptr;
  bool is_done_ = false;
};

}  // namespace sennit::fabric
