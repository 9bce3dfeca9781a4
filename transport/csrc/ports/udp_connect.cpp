// SPDX-License-Identifier: Apache-2.0
// How a udp port connects to its peers: paths from both offers, a trial of them, and a flow over the paths that work.
#include <algorithm>
#include <array>

#include "flow/eager.hpp"
#include "flow/immediate.hpp"
#include "ports/udp_peer.hpp"
#include "ports/udp_setup.hpp"

namespace sennit {

UdpPort::Peer& UdpPort::prepare(uint32_t peer, std::span<const std::byte> info, LaneSink& sink, bool is_tried) {
  check_peer("udp", offer_, peer, peer < peers_.size() && peers_[peer] != nullptr);
  auto made = std::make_unique<Peer>();
  made->rank = peer;
  made->offer = RoceOffer::decode(info);
  made->sink = &sink;
  const RoceOffer& theirs = made->offer;
  const auto payload_of = [this](const RoceOffer::Rail& one, const RoceOffer::Rail& other) {
    return pair_payload(interfaces_, one, other);
  };
  const auto [rails, first_path, path_count, config] = agree(offer_, peer, theirs, send_, payload_of);
  const RoceOffer::Peer& for_peer = for_peers_[peer];
  std::vector<RailPairs::Pair> pairs = rails.first;
  if (is_tried && !theirs.is_device && (pairs.size() + rails.reserves.size()) * path_count <= PATH_MAX_COUNT) {
    pairs.insert(pairs.end(), rails.reserves.begin(), rails.reserves.end());
    made->reserve_of = rails.reserve_of;
  }
  made->pair_count = static_cast<uint32_t>(pairs.size());
  made->payload_max_bytes = std::min<uint32_t>(config.payload_max_bytes, wire::PAYLOAD_MAX_BYTES);
  const size_t common_packet_bytes = wire::data_packet_bytes(config.payload_max_bytes);
  made->paths.reserve(path_count * pairs.size());
  for (uint32_t path = first_path; path < first_path + path_count; ++path) {
    for (const auto& [mine, other] : pairs) {
      const RoceOffer::Rail &our_rail = offer_.rails[mine], &their_rail = theirs.rails[other];
      UdpPath& entry = made->paths.emplace_back(their_rail.listen);
      entry.ends = {rank_, peer};
      entry.number = static_cast<uint32_t>(made->paths.size() - 1);
      entry.rail = mine;
      entry.sender = rails_[mine]->senders[path].get();
      entry.remote_qpn = theirs.for_reader.qpns[other * theirs.path_count + path];
      entry.next_psn = random_value<uint32_t>() & wire::PSN_MASK;
      entry.is_to_device = theirs.is_device;
      entry.trial_rkey = for_peer.eager_rkey;
      entry.local_listen = our_rail.listen;
      entry.source = our_rail.listen, entry.remote_source = their_rail.listen;
      entry.source.port = our_rail.entropies[path];
      entry.remote_source.port = their_rail.entropies[path];
      entry.sender->add_destination(their_rail.listen);
      entry.outgoing = wire::NetworkCrc(entry.source, their_rail.listen, common_packet_bytes);
      entry.incoming = wire::NetworkCrc(entry.remote_source, our_rail.listen, common_packet_bytes);
      paths_by_qpn_[for_peer.qpns[mine * offer_.path_count + path]] = &entry;
    }
  }
  peers_[peer] = std::move(made);
  return *peers_[peer];
}

// Paths over which nothing arrives are bad from the start. The flow tries them again from time to time.
void UdpPort::start(Peer& peer) {
  const uint32_t payload_bytes = peer.trial ? peer.trial->payload_bytes() : peer.payload_max_bytes;
  RoceOffer theirs = peer.offer;
  theirs.receive_window_bytes = window_at(theirs, payload_bytes);
  auto [rails, first_path, path_count, config] =
      agree(offer_, peer.rank, theirs, send_,
            [payload_bytes](const RoceOffer::Rail&, const RoceOffer::Rail&) { return payload_bytes; });
  for (UdpPath& path : peer.paths) {
    if (peer.trial && !peer.trial->is_used(path.number)) continue;
    path.index = static_cast<uint32_t>(peer.used.size());
    peer.used.push_back(&path);
  }
  config.path_count = static_cast<uint32_t>(peer.used.size());
  config.rail_count = config.path_count / path_count;
  peer.rail_count = config.rail_count;
  peer.payload_bytes = config.payload_max_bytes;
  // Packets to an address of this host pass no link that other senders share. The window leaves each peer its part of
  // the socket's memory, and that is all there is to protect.
  const bool is_on_this_host =
      std::all_of(peer.used.begin(), peer.used.end(), [](const UdpPath* path) { return path->stays_here(); });
  if (!is_on_this_host) config.receive_budget = &receive_budget_;
  config.agenda = &agenda_;
  config.agenda_member = peer.member = static_cast<uint32_t>(connected_.size());
  const std::span<std::byte> eager_memory(eager_memory_.get() + EAGER_RING_BYTES * peer.rank,
                                          size_t{EAGER_SLOT_COUNT} * flow::eager_slot_bytes(config));
  peer.lane = std::make_unique<FlowLane>(peer.rank, config, eager_memory, for_peers_[peer.rank].eager_rkey, exposure_,
                                         loans_, *peer.sink);
  connected_.push_back(&peer);
  agenda_.join();
  flow::Flow& flow = peer.lane->flow();
  flow.set_remote_eager(peer.offer.eager_address(rank_), peer.offer.for_reader.eager_rkey);
  peer.batch_packets = UdpSender::batch_packets(config.payload_max_bytes);
  for (const auto& rail : rails_) rail->receiver->expect_batches_of(peer.batch_packets);
  if (peer.trial) flow.on_heard(last_now_us_);
  const size_t common_packet_bytes = wire::data_packet_bytes(config.payload_max_bytes);
  for (UdpPath* path : peer.used) {
    path->flow = &flow;
    path->payload_limit_bytes = std::max(path->payload_limit_bytes, peer.payload_bytes);
    if (!peer.trial) continue;
    path->outgoing = wire::NetworkCrc(path->source, path->remote_listen, common_packet_bytes);
    path->incoming = wire::NetworkCrc(path->remote_source, path->local_listen, common_packet_bytes);
    if (peer.trial->told_bytes(path->number) == 0) flow.on_path_failed(last_now_us_, path->index);
  }
}

void UdpPort::connect(uint32_t peer, std::span<const std::byte> info, LaneSink& sink) {
  if (peer < peers_.size() && peers_[peer] != nullptr && peers_[peer]->trial != nullptr) {
    // After a trial that was cut short, a peer has no lane only if the caller gives up the group.
    if (peers_[peer]->lane == nullptr)
      throw std::invalid_argument("udp: the trial of the network to rank " + std::to_string(peer) + " is not over");
    return;
  }
  start(prepare(peer, info, sink, false));
}

void UdpPort::begin_trial(uint32_t peer, std::span<const std::byte> info, LaneSink& sink) {
  Peer& made = prepare(peer, info, sink, true);
  made.trial = std::make_unique<Trial>(Trial::Config{
      .path_count = static_cast<uint32_t>(made.paths.size()),
      .payload_max_bytes = made.payload_max_bytes,
      .decides = rank_ < peer,
      .pair_count = made.pair_count,
      .reserve_of = made.reserve_of,
      .peer_count = offer_.size - 1,
  });
  for (UdpPath& path : made.paths) path.trial = made.trial.get();
}

bool UdpPort::send_probes(Peer& peer, uint64_t now_us) {
  std::array<std::byte, wire::PAYLOAD_MAX_BYTES> payload;
  bool sent = false;
  for (Trial::Probe probe; peer.trial->poll(now_us, probe); sent = true) {
    const std::vector<std::byte> message = peer.trial->message();
    std::fill(std::copy(message.begin(), message.end(), payload.begin()), payload.begin() + probe.payload_bytes,
              std::byte{});
    UdpPath& path = peer.paths[probe.path];
    const uint32_t immediate = peer.offer.is_device ? flow::PROBE_IMMEDIATE : 0;
    const flow::DataOut packet{0, peer.offer.for_reader.eager_rkey, immediate, payload.data(), probe.payload_bytes};
    path.sender->take_error();
    path.sender->send_data(path, std::span(&packet, 1));
    if (const int error = path.sender->take_error()) path.error = error;
  }
  return sent;
}

bool UdpPort::try_network(uint64_t now_us) {
  last_now_us_ = now_us;
  const flow::CallClock clock(now_us);
  for (const auto& rail : rails_) {
    while (rail->receiver->receive(clock) != UdpReceiver::Received::nothing) {
    }
  }
  // Packets have the time of their arrival, which is later. What is sent must not seem to be earlier.
  now_us = last_now_us_ = clock.now_us();
  for (const auto& rail : rails_)
    for (const auto& sender : rail->senders) sender->flush(now_us);
  if (now_us >= look_at_us_) {
    look_for_refusals(now_us);
    look_at_us_ = now_us + REFUSALS_US;
  }
  bool is_over = true;
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
  return is_over;
}

uint64_t UdpPort::next_trial_us() const {
  uint64_t earliest_us = connected_.empty() ? UINT64_MAX : next_timeout_us();
  for (const auto& peer : peers_)
    if (peer && peer->trial) earliest_us = std::min(earliest_us, peer->trial->next_timeout_us());
  return earliest_us;
}

Trial* UdpPort::trial(uint32_t peer) { return peers_.at(peer) ? peers_[peer]->trial.get() : nullptr; }

std::vector<TriedPath> UdpPort::tried_paths(uint32_t peer) const {
  std::vector<TriedPath> out;
  if (!peers_.at(peer) || !peers_[peer]->trial) return out;
  const Trial& trial = *peers_[peer]->trial;
  for (const UdpPath& path : std::span(peers_[peer]->paths).first(trial.path_count()))
    out.push_back({path.source,
                   path.remote_listen,
                   path.remote_source,
                   path.local_listen,
                   trial.told_bytes(path.number),
                   trial.heard_bytes(path.number),
                   path.error,
                   trial.is_used(path.number),
                   {}});
  return out;
}

}  // namespace sennit
