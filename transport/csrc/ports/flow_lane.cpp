// SPDX-License-Identifier: Apache-2.0
#include "ports/flow_lane.hpp"

#include <algorithm>
#include <utility>

namespace sennit {

FlowLane::FlowLane(uint32_t peer, const flow::FlowConfig& config, std::span<std::byte> eager_memory,
                   uint32_t eager_rkey, RegisterRegion register_region, LaneSink& sink)
    : peer_(peer), sink_(sink), register_region_(std::move(register_region)), flow_(config, eager_memory, eager_rkey) {}

bool FlowLane::send_eager(const MessageHeader& header, uint32_t flags, const void* data) {
  return flow_.send_eager(header, flags, data, now_us_);
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
  const uint32_t rkey = register_region_(destination, header.size_bytes);
  const uint64_t ticket = tickets_.push(Ticket{receive_id, loan_id, false});
  flow_.advertise(ticket, header, destination, rkey, now_us_);
}

void FlowLane::grant_loans() {
  for (size_t index = 0; index < LOAN_COUNT && !wishes_.empty(); ++index) {
    Loan& loan = loans_[index];
    if (loan.is_out) continue;
    if (!loan.memory) loan.memory = std::make_unique_for_overwrite<std::byte[]>(MAX_LOAN_BYTES);
    loan.is_out = true;
    const Wish wish = wishes_.front();
    wishes_.pop();
    advertise_at(wish.receive_id, wish.header, loan.memory.get(), index + 1);
  }
}

void FlowLane::transfer(uint64_t send_id, uint64_t advert_id, const void* data, uint64_t size_bytes) {
  flow_.transfer(send_id, advert_id, static_cast<const std::byte*>(data), size_bytes, now_us_);
}

void FlowLane::release(uint64_t loan_id) {
  if (loan_id == 0) return;
  loans_[loan_id - 1].is_out = false;
  grant_loans();
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
      Ticket& ticket = tickets_[event.id];
      const auto [receive_id, loan_id, _] = ticket;
      ticket.is_done = true;
      while (!tickets_.empty() && tickets_.front().is_done) tickets_.pop();
      sink_.on_received(receive_id, event.data, loan_id);
      break;
    }
    case Kind::sent:
      sink_.on_sent(event.id);
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

bool FlowLane::pump(uint64_t now_us) {
  now_us_ = now_us;
  bool moved = false;
  flow::Event event;
  while (flow_.poll_event(event)) moved |= deliver(event);
  return moved;
}

}  // namespace sennit
