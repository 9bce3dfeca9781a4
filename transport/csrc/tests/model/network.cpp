// SPDX-License-Identifier: Apache-2.0
#include "model/network.hpp"

#include <algorithm>
#include <cstring>
#include <functional>

namespace sennit::model {

Network::Network() : packets_(std::make_unique_for_overwrite<Packet[]>(PACKETS_MAX)) {
  free_.reserve(PACKETS_MAX);
  for (uint16_t index = PACKETS_MAX; index-- > 0;) free_.push_back(index);
  happenings_.reserve(2 * PACKETS_MAX);
}

void Network::begin(const Schedule& schedule) {
  schedule_ = &schedule;
  random_ = SimRandom(SimRandom(~schedule.seed).next());
  for (const Happening& happening : happenings_)
    if (happening.packet < PACKETS_MAX) free_.push_back(happening.packet);
  happenings_.clear();
  links_ = {};
  now_us_ = 0;
  order_ = 0;
  counters_ = {};
}

void Network::push(uint64_t at_ns, uint32_t rank, uint16_t packet) {
  happenings_.push_back(Happening{at_ns, order_++, packet, static_cast<uint8_t>(rank)});
  std::ranges::push_heap(happenings_, std::greater<>{});
}

Happening Network::next() {
  std::ranges::pop_heap(happenings_, std::greater<>{});
  const Happening happening = happenings_.back();
  happenings_.pop_back();
  now_us_ = std::max(now_us_, happening.at_ns / 1'000);
  return happening;
}

Packet* Network::new_packet() {
  if (free_.empty()) return nullptr;
  Packet& packet = packets_[free_.back()];
  free_.pop_back();
  return &packet;
}

bool Network::is_black_hole(uint32_t rank, uint32_t path) const {
  for (uint32_t index = 0; index < schedule_->fault_count; ++index) {
    const Fault& fault = schedule_->faults[index];
    if (fault.kind == Fault::Kind::black_hole && (fault.paths >> path & 1) != 0 &&
        (fault.directions >> rank & 1) != 0 && now_us_ >= fault.from_us && now_us_ < fault.until_us)
      return true;
  }
  return false;
}

void Network::transmit(uint32_t rank, Packet& packet) {
  const LinkDraw& link = schedule_->ranks[rank].links[packet.path];
  LinkState& state = links_[rank][packet.path];
  const auto index = static_cast<uint16_t>(&packet - packets_.get());
  const auto drop = [&](uint64_t& counter) {
    ++counter;
    free_packet(index);
  };
  ++counters_.sent;
  const uint64_t now_ns = now_us_ * 1'000;
  uint64_t leaves_ns = now_ns;
  packet.is_marked = false;
  if (link.packet_ns != 0) {
    const uint64_t start_ns = std::max(state.busy_until_ns, now_ns);
    const uint64_t queued_packets = (start_ns - now_ns) / link.packet_ns;
    if (queued_packets >= link.queue_packets) return drop(counters_.queue_drops);
    packet.is_marked = queued_packets >= link.mark_packets;
    counters_.marked += packet.is_marked;
    leaves_ns = state.busy_until_ns = start_ns + link.packet_ns;
  }
  if (state.burst_left == 0 && happens(link.loss)) state.burst_left = link.burst_packets;
  if (state.burst_left != 0) {
    --state.burst_left;
    return drop(counters_.lost);
  }
  if (is_black_hole(rank, packet.path)) return drop(counters_.lost);
  // The port refuses it because of its ICRC. Damage to a predicted place is drawn when packets arrive.
  if (happens(link.corruption)) return drop(counters_.corrupted);

  const uint32_t tick_us = schedule_->ranks[1 - rank].tick_us;
  const auto arrival_ns = [&] {
    const uint64_t at_us = leaves_ns / 1'000 + link.delay_us + random_.below(link.jitter_us + 1);
    return (at_us + tick_us - 1) / tick_us * tick_us * 1'000;
  };
  if (happens(link.duplication)) {
    if (Packet* copy = new_packet()) {
      ++counters_.duplicated;
      copy->data = packet.data;
      copy->path = packet.path;
      copy->message = packet.message;
      copy->part = packet.part;
      copy->is_control = packet.is_control;
      copy->is_marked = packet.is_marked;
      copy->order = packet.order;
      std::memcpy(copy->body.data(), packet.body.data(), packet.data.size_bytes);
      push(arrival_ns(), 1 - rank, static_cast<uint16_t>(copy - packets_.get()));
    }
  }
  push(arrival_ns(), 1 - rank, index);
}

}  // namespace sennit::model
