// SPDX-License-Identifier: Apache-2.0
#include "model/exchange/network.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace sennit::model::exchange {
namespace {

constexpr uint32_t BATCH_PACKETS = 4;
constexpr size_t CONTROL_BYTES = 1'024;  // larger than any control of so small packets

flow::FlowConfig config_of(const Schedule& schedule, uint32_t rank, uint32_t peer) {
  flow::FlowConfig config;
  config.path_count = schedule.network.path_count;
  config.payload_max_bytes = schedule.network.payload_bytes;
  config.eager_slot_count = EAGER_SLOTS;
  config.window_bytes = schedule.network.window_packets * schedule.network.payload_bytes;
  config.ack_every_packets = 4;
  config.peer_timeout_us = PEER_TIMEOUT_US;
  config.seed = schedule.seed * RANKS_MAX + rank + peer;
  return config;
}

uint32_t eager_key(uint32_t rank, uint32_t peer) { return 0xEA6E'0000 + rank * RANKS_MAX + peer; }

}  // namespace

void Network::begin(const Schedule& schedule) {
  settings_ = schedule.network;
  random_ = SimRandom(schedule.seed ^ 0x4E7);
  losses_left_ = settings_.losses_max;
  links_.assign(size_t{RANKS_MAX} * RANKS_MAX * PATHS_MAX, {});
}

void Network::send(uint32_t from, uint32_t to, uint64_t now_us, Packet packet) {
  if (losses_left_ != 0 && random_.below(1'000) < settings_.loss_of_1000) {
    --losses_left_;
    return;
  }
  Link& link = this->link(from, to, packet.path);
  link.last_us = std::max(link.last_us, now_us + settings_.delay_us + random_.below(settings_.jitter_us + 1));
  packet.at_us = link.last_us;
  link.packets.push_back(std::move(packet));
}

bool Network::receive(uint32_t from, uint32_t to, uint64_t now_us, Packet& out) {
  Link* next = nullptr;
  for (uint32_t path = 0; path < settings_.path_count; ++path) {
    Link& one = link(from, to, path);
    if (one.packets.empty() || one.packets.front().at_us > now_us) continue;
    if (next == nullptr || one.packets.front().at_us < next->packets.front().at_us) next = &one;
  }
  if (next == nullptr) return false;
  out = std::move(next->packets.front());
  next->packets.pop_front();
  return true;
}

Remote::Remote(const Schedule& schedule, uint32_t rank, uint32_t peer, Network& network, Exposure& exposure,
               LoanPool& loans, LaneSink& sink)
    : rank_(rank),
      peer_(peer),
      network_(network),
      eager_memory_(size_t{EAGER_SLOTS} * schedule.network.payload_bytes),
      lane_(peer, config_of(schedule, rank, peer), eager_memory_, eager_key(rank, peer), exposure, loans, sink) {}

void Remote::introduce(const Remote& other) {
  lane_.flow().set_remote_eager(reinterpret_cast<uint64_t>(other.eager_memory_.data()),
                                eager_key(other.rank_, other.peer_));
}

bool Remote::drive(uint64_t now_us) {
  now_us_ = now_us;
  flow::Flow& flow = lane_.flow();
  bool moved = false;
  for (Packet packet; network_.receive(peer_, rank_, now_us, packet);) {
    if (packet.is_control) {
      flow.on_control(now_us, packet.path, packet.bytes);
      continue;
    }
    const flow::DataOut& data = packet.data;
    flow::Placement place;
    const flow::Verdict verdict = flow.locate(data.immediate, data.remote_address, data.rkey, data.size_bytes, place);
    if (verdict != flow::Verdict::place && verdict != flow::Verdict::duplicate) continue;
    if (place.destination != nullptr) std::memcpy(place.destination, packet.bytes.data(), packet.bytes.size());
    flow.on_data(now_us, packet.path, data.immediate, data.size_bytes);
    moved |= verdict == flow::Verdict::place;
  }
  moved |= lane_.pump(now_us);
  if (flow.next_timeout_us() <= now_us) flow.on_timeout(now_us);
  send(now_us);
  return moved;
}

void Remote::send(uint64_t now_us) {
  flow::Flow& flow = lane_.flow();
  std::array<std::byte, CONTROL_BYTES> control;
  std::array<flow::DataOut, BATCH_PACKETS> packets;
  uint32_t path = 0;
  while (const size_t size_bytes = flow.poll_control(now_us, control, path))
    network_.send(rank_, peer_, now_us, {0, path, true, {}, {control.begin(), control.begin() + size_bytes}});
  const size_t count = flow.poll_data(now_us, packets, path);
  for (const flow::DataOut& data : std::span(packets).first(count))
    network_.send(rank_, peer_, now_us, {0, path, false, data, {data.payload, data.payload + data.size_bytes}});
}

void Remote::abort(std::string_view reason) {
  lane_.abort(reason);
  send(now_us_);
}

void Remote::leave() {
  lane_.flow().close();
  send(now_us_);
  lane_.revoke();
}

}  // namespace sennit::model::exchange
