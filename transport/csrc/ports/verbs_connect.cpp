// SPDX-License-Identifier: Apache-2.0
// How a verbs port connects to its peers: queue pairs from both offers, a trial of them, and a flow over those that
// work.
#include <algorithm>
#include <array>
#include <cerrno>
#include <stdexcept>

#include "flow/immediate.hpp"
#include "ports/verbs_path.hpp"
#include "ports/verbs_port.hpp"
#include "wire/packet.hpp"

namespace sennit {

VerbsPort::Peer& VerbsPort::prepare(uint32_t peer, std::span<const std::byte> info, LaneSink& sink) {
  RoceOffer theirs = RoceOffer::decode(info);
  check_peer("verbs", offer_, peer, peer < peers_.size() && peers_[peer] != nullptr);
  const auto [rails, first_path, path_count, config] =
      agree(offer_, peer, theirs, config_, [](const RoceOffer::Rail& ours, const RoceOffer::Rail& other) {
        return std::min(ours.payload_max_bytes, other.payload_max_bytes);
      });
  peers_[peer] = std::make_unique<Peer>();
  Peer& made = *peers_[peer];
  made.rank = peer;
  made.offer = std::move(theirs);
  made.sink = &sink;
  made.rail_count = rails.first.size();
  made.payload_max_bytes = config.payload_max_bytes;
  for (uint32_t path = 0; path < path_count; ++path) {
    for (const auto& [mine, other] : rails.first) {
      const RoceOffer::Rail& their_rail = made.offer.rails[other];
      Path& entry = *find_path(*rails_[mine].adapter, for_peers_[peer].qpns[mine * offer_.path_count + path]);
      VerbsRoute route;
      route.local = rails_[mine].address;
      route.remote = their_rail.listen;
      route.remote_qpn = made.offer.for_reader.qpns[other * made.offer.path_count + path];
      route.mtu_bytes = config.payload_max_bytes;
      // With RC both ends must know these numbers. Queue pair numbers are known to both, and as good as random.
      route.first_psn = entry.queue.number();
      route.expected_psn = route.remote_qpn;
      route.entropy = offer_.rails[mine].entropies[path];
      entry.index = static_cast<uint32_t>(made.paths.size());
      entry.peer = &made;
      entry.source = offer_.rails[mine].listen;
      entry.source.port = route.entropy;
      entry.remote_source = entry.remote_listen = their_rail.listen;
      entry.remote_source.port = their_rail.entropies[path];
      entry.queue.connect(route);
      made.paths.push_back(&entry);
    }
  }
  return made;
}

// Paths over which nothing arrives are bad from the start. The flow tries them again from time to time.
void VerbsPort::start(Peer& peer) {
  if (peer.trial) peer.payload_max_bytes = peer.trial->payload_bytes();
  const uint32_t payload_bytes = peer.payload_max_bytes;
  auto [rails, first_path, path_count, config] =
      agree(offer_, peer.rank, peer.offer, config_,
            [payload_bytes](const RoceOffer::Rail&, const RoceOffer::Rail&) { return payload_bytes; });
  config.receive_budget = &receive_budget_;
  config.agenda = &agenda_;
  config.agenda_member = static_cast<uint32_t>(connected_.size());
  const size_t eager_bytes = size_t{EAGER_SLOT_COUNT} * payload_bytes;
  std::unique_ptr<std::byte[]>& memory = eager_memory_[peer.rank] = std::make_unique<std::byte[]>(eager_bytes);
  peer.eager_address = reinterpret_cast<uintptr_t>(memory.get());
  peer.lane = std::make_unique<FlowLane>(peer.rank, config, std::span(memory.get(), eager_bytes), 0, exposure_, loans_,
                                         *peer.sink);
  connected_.push_back(&peer);
  agenda_.join();
  flow::Flow& flow = peer.lane->flow();
  flow.set_remote_eager(peer.offer.eager_address(rank_), peer.offer.for_reader.eager_rkey);
  if (peer.trial) flow.on_heard(last_now_us_);
  for (Path* path : peer.paths) {
    path->flow = &flow;
    if (path->is_broken || (peer.trial && peer.trial->told_bytes(path->index) == 0))
      flow.on_path_failed(last_now_us_, path->index);
  }
}

void VerbsPort::connect(uint32_t peer, std::span<const std::byte> info, LaneSink& sink) {
  if (peer < peers_.size() && peers_[peer] != nullptr && peers_[peer]->trial != nullptr) {
    if (peers_[peer]->lane == nullptr)
      throw std::invalid_argument("verbs: the trial of the network to rank " + std::to_string(peer) + " is not over");
    return;
  }
  start(prepare(peer, info, sink));
}

void VerbsPort::begin_trial(uint32_t peer, std::span<const std::byte> info, LaneSink& sink) {
  if (config_.service == VerbsService::rc) return;
  Peer& made = prepare(peer, info, sink);
  made.trial = std::make_unique<Trial>(Trial::Config{
      .path_count = static_cast<uint32_t>(made.paths.size()),
      .payload_max_bytes = made.payload_max_bytes,
      .decides = rank_ < peer,
      .peer_count = offer_.size - 1,
  });
}

bool VerbsPort::send_probes(Peer& peer, uint64_t now_us) {
  std::array<std::byte, wire::PAYLOAD_MAX_BYTES> payload;
  bool sent = false;
  for (Trial::Probe probe; has_room(peer) && peer.trial->poll(now_us, probe); sent = true) {
    const std::vector<std::byte> message = peer.trial->message();
    std::fill(std::copy(message.begin(), message.end(), payload.begin()), payload.begin() + probe.payload_bytes,
              std::byte{});
    const uint32_t immediate = peer.offer.is_device ? flow::PROBE_IMMEDIATE : 0;
    const flow::DataOut packet{0, peer.offer.for_reader.eager_rkey, immediate, payload.data(), probe.payload_bytes};
    Path& path = *peer.paths[probe.path];
    if (!rails_[path.rail].is_up) path.error = ENETDOWN;
    send_data(path, std::span(&packet, 1));
  }
  return sent;
}

bool VerbsPort::try_network(uint64_t now_us) {
  last_now_us_ = now_us;
  poll_events(now_us);
  if (now_us >= revive_at_us_) revive_paths(now_us);
  bool is_over;
  do {
    while (poll_completions(now_us)) {
    }
    if (!failure().empty()) throw std::runtime_error(std::string(failure()));
    is_over = true;
    for (const auto& peer : peers_) {
      if (!peer || !peer->trial) continue;
      send_probes(*peer, now_us);
      if (!peer->trial->is_settled()) {
        is_over = false;
      } else if (!peer->lane) {
        start(*peer);
      }
    }
    send_round(now_us);  // peers that are done may send already
  } while (!is_over && arm());
  return is_over;
}

uint64_t VerbsPort::next_trial_us() const {
  uint64_t earliest_us = next_timeout_us();
  for (const auto& peer : peers_)
    if (peer && peer->trial && has_room(*peer)) earliest_us = std::min(earliest_us, peer->trial->next_timeout_us());
  return earliest_us;
}

Trial* VerbsPort::trial(uint32_t peer) { return peers_.at(peer) ? peers_[peer]->trial.get() : nullptr; }

std::vector<TriedPath> VerbsPort::tried_paths(uint32_t peer) const {
  std::vector<TriedPath> out;
  if (!peers_.at(peer) || !peers_[peer]->trial) return out;
  const Trial& trial = *peers_[peer]->trial;
  for (const Path* path : peers_[peer]->paths) {
    wire::Endpoint listen = path->source;
    listen.port = wire::ROCE_UDP_PORT;
    out.push_back({path->source, path->remote_listen, path->remote_source, listen, trial.told_bytes(path->index),
                   trial.heard_bytes(path->index), path->error, true, path->adapter->name()});
  }
  return out;
}

}  // namespace sennit
