// SPDX-License-Identifier: Apache-2.0
#include "ports/flow_lane.hpp"

#include <algorithm>
#include <utility>

namespace sennit {

FlowLane::FlowLane(uint32_t peer, const flow::FlowConfig& config, std::span<std::byte> eager_memory,
                   uint32_t eager_rkey, Exposure& exposure, LoanPool& loans, LaneSink& sink)
    : peer_(peer),
      sink_(sink),
      exposure_(exposure),
      flow_(config, eager_memory, eager_rkey),
      agenda_(config.agenda),
      member_(config.agenda_member),
      pool_(loans) {}

bool FlowLane::send_eager(const MessageHeader& header, uint32_t flags, const void* data) {
  return flow_.send_eager(header, flags, data, now_us());
}

void FlowLane::advertise(uint64_t receive_id, const MessageHeader& header, void* destination) {
  if (destination != nullptr || header.size_bytes == 0) {
    advertise_at(receive_id, header, static_cast<std::byte*>(destination), 0);
    return;
  }
  wishes_.push(Wish{receive_id, header});
  grant_loans();
}

void FlowLane::advertise_at(uint64_t receive_id, const MessageHeader& header, std::byte* destination,
                            uint64_t loan_id) {
  const uint64_t region = exposure_.open(destination, header.size_bytes);
  if (agenda_ != nullptr) agenda_->wake(member_);
  receives_.push(OpenReceive{receive_id, header, destination, loan_id, region});
  tell_opened();
}

void FlowLane::ask(uint64_t receive_id) {
  for (uint64_t number = receives_.first(); number != receives_.end(); ++number)
    if (!receives_[number].is_done && receives_[number].receive_id == receive_id) flow_.ask(number, now_us());
}

bool FlowLane::tell_opened() {
  bool moved = false;
  flow::Keys keys;
  while (advertised_below_ != receives_.end() && exposure_.is_open(receives_[advertised_below_].region, keys)) {
    const uint64_t number = advertised_below_++;
    flow_.advertise(number, receives_[number].header, receives_[number].destination, keys, now_us());
    moved = true;
  }
  return moved;
}

void FlowLane::grant_loans() {
  for (size_t index = 0; index < LOAN_COUNT && !wishes_.empty(); ++index) {
    if (loans_[index] != nullptr) continue;
    std::byte* const memory = pool_.take(loans_out_ >= OWN_LOAN_COUNT);
    if (memory == nullptr) return;
    loans_[index] = memory;
    ++loans_out_;
    const Wish wish = wishes_.front();
    wishes_.pop();
    advertise_at(wish.receive_id, wish.header, memory, index + 1);
  }
}

void FlowLane::transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes, Use) {
  const auto* bytes = static_cast<const std::byte*>(data);
  const uint64_t number = sends_.push(OpenSend{send_id, exposure_.open_source(bytes, size_bytes), false});
  flow_.transfer(number, advert_id, bytes, size_bytes);
}

bool FlowLane::release(uint64_t loan_id) {
  if (loan_id == 0) return true;
  pool_.give_back(loans_[loan_id - 1]);
  loans_[loan_id - 1] = nullptr;
  --loans_out_;
  grant_loans();
  return true;
}

bool FlowLane::deliver(const flow::Event& event) {
  using Kind = flow::Event::Kind;
  switch (event.kind) {
    case Kind::eager:
      if (sink_.on_eager(peer_, event.header, event.flags, event.data)) return true;
      flow_.defer_eager();
      return false;
    case Kind::advert:
      sink_.on_advert(peer_, event.header, event.id);
      break;
    case Kind::received: {
      OpenReceive& receive = receives_[event.id];
      receive.data = event.data;
      exposure_.close(receive.region);
      closing_.push(event.id);
      hand_over_closed();
      break;
    }
    case Kind::returned: {
      const OpenReceive& receive = receives_[event.id];
      flow::Keys keys;
      if (exposure_.is_open(receive.region, keys))
        flow_.advertise(event.id, receive.header, receive.destination, keys, now_us());
      break;
    }
    case Kind::sent:
      returning_.push(event.id);
      hand_over_returned();
      break;
    case Kind::peer_lost:
      sink_.on_peer_lost(peer_, event.reason);
      break;
    case Kind::peer_aborted:
      sink_.on_peer_aborted(peer_, event.reason);
      break;
  }
  return true;
}

bool FlowLane::hand_over_closed() {
  bool moved = false;
  while (!closing_.empty() && exposure_.is_closed(receives_[closing_.front()].region)) {
    OpenReceive& receive = receives_[closing_.front()];
    const OpenReceive done = receive;
    closing_.pop();
    receive.is_done = true;
    while (!receives_.empty() && receives_.front().is_done) receives_.pop();
    sink_.on_received(done.receive_id, done.data, done.loan_id);
    moved = true;
  }
  return moved;
}

bool FlowLane::hand_over_returned() {
  bool moved = false;
  while (!returning_.empty() && exposure_.is_source_closed(sends_[returning_.front()].source)) {
    OpenSend& send = sends_[returning_.front()];
    const uint64_t send_id = send.send_id;
    returning_.pop();
    send.is_done = true;
    while (!sends_.empty() && sends_.front().is_done) sends_.pop();
    sink_.on_sent(send_id);
    moved = true;
  }
  return moved;
}

void FlowLane::abort(std::string_view reason) {
  flow_.abort(reason);
  revoke();
}

void FlowLane::revoke() noexcept {
  flow_.revoke();
  wishes_.clear();
  advertised_below_ = receives_.end();
  closing_.clear();
  returning_.clear();
}

// While this rank's device holds the memory of a complete message, the operation waits for the device, not for the
// peer. The peer may have left: with RC the last packets then come back as errors, which takes the device some time.
void FlowLane::expect(uint64_t now_us) {
  if (closing_.empty() && returning_.empty()) flow_.expect(now_us);
}

bool FlowLane::pump(uint64_t now_us) {
  pumped_us_ = now_us;
  bool moved = tell_opened();
  moved |= hand_over_closed();
  moved |= hand_over_returned();
  flow::Event event;
  while (flow_.poll_event(event)) moved |= deliver(event);
  // Only now: the sink may have used what has just come.
  while (flow_.give_back(event)) sink_.on_advert_withdrawn(peer_, event.header);
  return moved;
}

}  // namespace sennit
