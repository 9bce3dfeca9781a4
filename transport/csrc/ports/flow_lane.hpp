// SPDX-License-Identifier: Apache-2.0
// A lane over a flow, which udp, verbs and the simulator give to the message layer.
//
// The port drives flow()'s wire side and calls pump() after arrivals and timers. The lane passes events on to its sink,
// and lends memory for receives without a destination. There is one lane for each peer. Memory is opened before the
// peer hears of it, and closed before the sink hears of the end.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "flow/agenda.hpp"
#include "flow/flow.hpp"
#include "flow/sequence_ring.hpp"
#include "messages/lane.hpp"
#include "ports/exposure.hpp"
#include "ports/loan_pool.hpp"

namespace sennit {

class FlowLane final : public Lane {
 public:
  // The most loans at a time, and how many of them do not depend on what other lanes have.
  static constexpr size_t LOAN_COUNT = NETWORK_LOANS_MAX, OWN_LOAN_COUNT = NETWORK_LOANS_OWN;

  // `eager_memory` and `eager_rkey` as in flow::Flow. The port owns that memory, because its address is in the offer,
  // which goes out before there is a lane. `exposure` and `loans` outlive the lane.
  FlowLane(uint32_t peer, const flow::FlowConfig& config, std::span<std::byte> eager_memory, uint32_t eager_rkey,
           Exposure& exposure, LoanPool& loans, LaneSink& sink);

  flow::Flow& flow() { return flow_; }
  const flow::Flow& flow() const { return flow_; }
  // Hands out what happened since the last call. True when there was anything.
  bool pump(uint64_t now_us);
  // When to pump and send next, if nothing wakes the flow before. 0: now.
  uint64_t next_visit_us() const {
    const bool awaits_exposure = advertised_below_ != receives_.end() || !closing_.empty() || !returning_.empty();
    return awaits_exposure || flow_.has_event() ? 0 : flow_.next_timeout_us();
  }
  // Whether nothing is still to come: all messages are complete on both sides, and all loans are back.
  bool is_settled() const { return idle() && receives_.empty() && wishes_.empty() && loans_out_ == 0; }
  // Whether everything sent is acknowledged.
  bool idle() const { return flow_.idle() && returning_.empty(); }
  // Like flow().abort and flow().revoke. The sink hears nothing more.
  void abort(std::string_view reason);
  void revoke() noexcept;

  uint64_t eager_max_bytes() const override { return flow_.eager_max_bytes(); }
  [[nodiscard]] bool send_eager(const MessageHeader& header, uint32_t flags, const void* data) override;
  void advertise(uint64_t receive_id, const MessageHeader& header, void* destination) override;
  void ask(uint64_t receive_id) override;
  using Lane::transfer;
  void transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes, Use use) override;
  bool release(uint64_t loan_id) override;
  void expect(uint64_t now_us) override;
  uint64_t heard_us() const override { return flow_.last_heard_us(); }
  uint64_t silent_us() const override { return flow_.silent_us(); }
  std::string describe() const override { return flow_.describe(); }

 private:
  struct Wish {
    uint64_t receive_id;
    MessageHeader header;
  };
  // The flow's receive id is the number of one of these, so that `received` finds loan and region again.
  struct OpenReceive {
    uint64_t receive_id;
    MessageHeader header;
    std::byte* destination;
    uint64_t loan_id;
    uint64_t region;
    const std::byte* data = nullptr;
    bool is_done = false;
  };
  // The same for a send.
  struct OpenSend {
    uint64_t send_id;
    uint64_t source;
    bool is_done;
  };

  void advertise_at(uint64_t receive_id, const MessageHeader& header, std::byte* destination, uint64_t loan_id);
  void grant_loans();
  // Each of these hands out what is done by now, in order. True when there was anything.
  bool tell_opened();
  bool hand_over_closed();
  bool hand_over_returned();
  // False: the sink has no room for this eager message.
  bool deliver(const flow::Event& event);

  // The time of calls of the message side: of the port's round, or of the last pump.
  uint64_t now_us() const { return agenda_ != nullptr ? agenda_->now_us() : pumped_us_; }

  const uint32_t peer_;
  LaneSink& sink_;
  Exposure& exposure_;
  flow::Flow flow_;
  flow::Agenda* const agenda_;
  const uint32_t member_;
  uint64_t pumped_us_ = 0;
  LoanPool& pool_;
  std::array<std::byte*, LOAN_COUNT> loans_{};  // a loan's id is its index plus one: 0 is "not a loan"
  size_t loans_out_ = 0;
  // Receives as loans that wait for memory, in call order. They are not among receives_, because others overtake them.
  flow::SequenceRing<Wish> wishes_;
  // From the opening of the memory to the message's end.
  flow::SequenceRing<OpenReceive> receives_;
  flow::SequenceRing<OpenSend> sends_;
  uint64_t advertised_below_ = 0;  // later receives wait for their keys to open, in order
  // Numbers of receives and sends whose messages are complete, in the order of their events. A device still holds the
  // memory, and lets go of it in this order. Without these queues each round would look at all open messages.
  flow::SequenceRing<uint64_t> closing_, returning_;
};

}  // namespace sennit
