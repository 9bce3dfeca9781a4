// SPDX-License-Identifier: Apache-2.0
#include "ports/udp/udp_port.hpp"

#include <poll.h>
#include <sys/mman.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <numeric>
#include <stdexcept>
#include <system_error>

#include "flow/control.hpp"
#include "flow/eager.hpp"
#include "flow/immediate.hpp"
#include "ports/flow_lane.hpp"
#include "ports/roce_offer.hpp"
#include "ports/trial.hpp"
#include "ports/udp/udp_setup.hpp"
#include "wire/utf8.hpp"

namespace sennit {
namespace {

// Receive memory that a rail asks of the kernel: this much for each peer, within these bounds.
constexpr size_t RECEIVE_BUFFER_PER_PEER_BYTES = 4 << 20;
constexpr size_t RECEIVE_BUFFER_MIN_BYTES = 8 << 20, RECEIVE_BUFFER_MAX_BYTES = 32 << 20;
// Rounds in one progress call, and batches that a rail receives in one: of data, and with control packets.
constexpr int ROUND_MAX_COUNT = 4;
constexpr uint32_t DATA_MAX_PER_ROUND = 4, RECEIVE_MAX_PER_ROUND = 8;
constexpr uint64_t BLOCKED_RETRY_US = 50;
constexpr size_t KEY_POOL_COUNT = 64;  // 256 bytes: one getrandom of this size never blocks nor returns less

}  // namespace

struct UdpPort::Rail {
  std::unique_ptr<UdpReceiver> receiver;
  std::vector<std::unique_ptr<UdpSender>> senders;  // by path
};

struct UdpPort::Peer {
  uint32_t rank;
  RoceOffer offer;  // the peer's
  LaneSink* sink;
  std::vector<UdpPath> paths;  // all that are tried
  std::vector<UdpPath*> used;  // by the flow, which has its own numbers for them; none before there is a lane
  size_t rail_count = 0;       // path p of the flow uses rail p mod rail_count
  uint32_t pair_count = 0;     // of rails, with the reserves that are tried
  std::vector<uint32_t> reserve_of;
  uint32_t payload_bytes = 0;  // payload of a full packet, once there is a lane
  uint32_t payload_max_bytes;  // what the interfaces at both ends take
  size_t batch_packets;
  std::unique_ptr<Trial> trial;    // null: not tried
  std::unique_ptr<FlowLane> lane;  // null until the trial is over
  uint32_t member;                 // of the port's agenda, once there is a lane
  // Nobody listens at the other end of this path any more. What the peer sent before that may wait in a socket still.
  const UdpPath* refused = nullptr;
  uint64_t refused_us = 0;
  bool is_gone = false;                                               // refused, and all that it sent is read
  bool is_refused() const { return refused != nullptr && !is_gone; }  // it is not judged yet
};

UdpPort::UdpPort(uint32_t rank, uint32_t size, const UdpConfig& config)
    : rank_(rank), send_(config), send_counters_(config.counter_page), receive_counters_(config.counter_page) {
  if (size < 1 || rank >= size)
    throw std::invalid_argument("udp: rank " + std::to_string(rank) + " is not below the size " + std::to_string(size));
  config.check("udp", config.rails.size());
  offer_.rank = rank;
  offer_.size = size;
  offer_.path_count = config.path_count;
  offer_.eager_slot_count = EAGER_SLOT_COUNT;
  offer_.receive_window_bytes = UINT64_MAX;
  const size_t by_peers =
      std::clamp(RECEIVE_BUFFER_PER_PEER_BYTES * (size - 1), RECEIVE_BUFFER_MIN_BYTES, RECEIVE_BUFFER_MAX_BYTES);
  UdpConfig sized = config;
  if (sized.receive_buffer_bytes == 0) sized.receive_buffer_bytes = by_peers;
  for (const UdpRailConfig& rail : config.rails) {
    const auto interface = static_cast<uint8_t>(&rail - config.rails.data());
    open_rail(rail.address, rail.port, interface, sized);
    if (!rail.other_family_address.empty()) open_rail(rail.other_family_address, rail.port, interface, sized);
  }

  const uint64_t window_bytes = std::min<uint64_t>(offer_.receive_window_bytes, config.window_bytes);
  offer_.takes_local_packets = std::all_of(offer_.rails.begin(), offer_.rails.end(), [&](const RoceOffer::Rail& rail) {
    return takes_local_packets(interfaces_, rail.listen.is_ipv6, window_bytes);
  });

  // Only address space: pages come with the first packet, so peers on other ports cost nothing.
  const size_t eager_bytes = EAGER_RING_BYTES * size;
  void* memory = mmap(nullptr, eager_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "udp: no memory for eager messages");
  eager_memory_ = {static_cast<std::byte*>(memory), Unmap{eager_bytes}};
  offer_.eager_base = reinterpret_cast<uintptr_t>(memory);
  peers_.resize(size);
  for_peers_.resize(size);
  for (uint32_t peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    for_peers_[peer].qpns = reserve_queue_pairs(static_cast<uint32_t>(rails_.size()) * config.path_count);
    for_peers_[peer].eager_rkey = random_value<uint32_t>();
  }
}

// Reserves successive numbers, so that the peer needs only the first. The first is random.
std::vector<uint32_t> UdpPort::reserve_queue_pairs(uint32_t count) {
  std::vector<uint32_t> qpns(count);
  do {
    std::iota(qpns.begin(), qpns.end(), random_value<uint32_t>() & wire::QPN_MASK);
    // 0 and 1 are InfiniBand's management.
  } while (qpns.front() < 2 || qpns.back() > wire::QPN_MASK ||
           std::any_of(qpns.begin(), qpns.end(), [&](uint32_t qpn) { return paths_by_qpn_.contains(qpn); }));
  for (const uint32_t qpn : qpns) paths_by_qpn_.emplace(qpn, nullptr);
  return qpns;
}

UdpPort::~UdpPort() = default;

void UdpPort::Unmap::operator()(std::byte* memory) const { munmap(memory, size_bytes); }

void UdpPort::open_rail(const std::string& address, uint16_t port, uint8_t interface, const UdpConfig& config) {
  auto rail = std::make_unique<Rail>();
  UdpSocket listener = open_listener(address, port, config.ports);
  RoceOffer::Rail& offered = offer_.rails.emplace_back();
  offered.listen = listener.local();
  offered.interface = interface;
  const InterfaceFacts facts = facts_of(interfaces_, listener.local());
  offered.prefix_bits = facts.prefix_bits;
  offered.payload_max_bytes = payload_for_mtu(facts.mtu_bytes, listener.local());
  const size_t granted_bytes = listener.set_receive_buffer(config.receive_buffer_bytes);
  offer_.receive_window_bytes =
      std::min(offer_.receive_window_bytes, window_for(granted_bytes, offered.payload_max_bytes, offer_.size - 1));
  listener.report_arrivals();
  listener.enable_receive_offload();  // without it packets come one by one
  rail->receiver = std::make_unique<UdpReceiver>(rank_, std::move(listener), paths_by_qpn_, *receive_counters_);
  for (uint32_t path = 0; path < offer_.path_count; ++path) {
    rail->senders.push_back(
        std::make_unique<UdpSender>(send_sockets_->open(address, config.ports, path), *send_counters_));
    offered.entropies.push_back(rail->senders.back()->local().port);
  }
  rails_.push_back(std::move(rail));
}

std::vector<std::byte> UdpPort::local_info() const { return offer_.encode(); }

uint32_t UdpPort::next_key() {
  if (keys_.empty()) {
    const auto fresh = random_value<std::array<uint32_t, KEY_POOL_COUNT>>();
    keys_.assign(fresh.begin(), fresh.end());
  }
  const uint32_t key = keys_.back();
  keys_.pop_back();
  return key;
}

UdpPort::Peer& UdpPort::connected(uint32_t peer) {
  if (peer >= peers_.size() || peers_[peer] == nullptr || peers_[peer]->lane == nullptr)
    throw std::out_of_range("udp: rank " + std::to_string(peer) + " is not connected");
  return *peers_[peer];
}

Lane& UdpPort::lane(uint32_t peer) { return *connected(peer).lane; }

void UdpPort::close_unused_rails() {
  std::vector<bool> is_used(rails_.size());
  for (const Peer* peer : connected_)
    for (const UdpPath* path : peer->used) is_used[path->rail] = true;
  for (size_t rail = rails_.size(); rail-- > 0;) {
    if (is_used[rail]) continue;
    rails_.erase(rails_.begin() + static_cast<ptrdiff_t>(rail));
    offer_.rails.erase(offer_.rails.begin() + static_cast<ptrdiff_t>(rail));
  }
}

// How a udp port connects to its peers: paths from both offers, a trial of them, and a flow over the paths that work.

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

// What a udp port does in a round: it receives, hands over what arrived, and sends.

bool UdpPort::progress(uint64_t now_us) {
  // Acknowledgements are timed, so each batch gets its time of arrival.
  const flow::CallClock clock(now_us);
  agenda_.set_now(now_us);
  bool moved = false;
  for (int round = 0; round < ROUND_MAX_COUNT; ++round) {
    bool received = false;
    for (const auto& rail : rails_) received |= receive_from(*rail->receiver, clock);
    const bool delivered = pump(clock.now_us());
    if (!send_round(clock.now_us()) && !received && !delivered) break;
    moved = true;
  }
  last_now_us_ = clock.now_us();
  return moved;
}

// What one peer brought may wake the lanes of others, so the list grows in the loop.
bool UdpPort::pump(uint64_t now_us) {
  bool delivered = false;
  for (size_t turn = 0; turn < agenda_.ready().size(); ++turn)
    delivered |= connected_[agenda_.ready()[turn]]->lane->pump(now_us);
  return delivered;
}

// Receives as many data batches as this rank may send meanwhile, and the control packets between them. It does not try
// for more: finding the socket empty costs a system call.
bool UdpPort::receive_from(UdpReceiver& receiver, const flow::CallClock& clock) {
  const auto wanted = std::clamp(static_cast<uint32_t>(connected_.size()), 1u, DATA_MAX_PER_ROUND);
  uint32_t data = 0, batches = 0;
  while (data < wanted && batches < RECEIVE_MAX_PER_ROUND) {
    const auto received = receiver.receive(clock);
    if (received == UdpReceiver::Received::nothing) break;
    ++batches;
    if (received == UdpReceiver::Received::data) ++data;
  }
  return batches != 0;
}

bool UdpPort::send_round(uint64_t now_us) {
  for (const auto& rail : rails_)
    for (const auto& sender : rail->senders)
      if (!sender->flush(now_us)) return false;
  bool sent = false;
  read_until_us_ = now_us;
  for (const auto& rail : rails_) read_until_us_ = std::min(read_until_us_, rail->receiver->received_until_us());
  // Each peer gets the time of its own turn, because a round-trip time must not include the turns of others.
  const flow::CallClock clock(now_us);
  agenda_.wake_due(now_us);
  const size_t ready_count = agenda_.ready().size();
  for (size_t turn = 0; turn < ready_count; ++turn) {
    Peer& peer = *connected_[agenda_.ready()[(next_turn_ + turn) % ready_count]];
    sent |= send_from(peer, turn != 0 ? clock.now_us() : now_us);
  }
  ++next_turn_;
  for (const auto& rail : rails_)
    for (const auto& sender : rail->senders)
      if (sender->has_refused()) note_refused(*sender, clock.now_us());
  agenda_.settle(now_us, [this](uint32_t member) {
    const Peer& peer = *connected_[member];
    const bool is_due = peer.is_refused() || (peer.trial && peer.trial->has_due());
    return is_due ? 0 : peer.lane->next_visit_us();
  });
  return sent;
}

void UdpPort::note_refused(UdpSender& sender, uint64_t now_us) {
  for (const RefusedPacket& packet : sender.take_refused()) {
    for (const auto& peer : peers_) {
      if (!peer) continue;
      const auto its = std::find_if(peer->paths.begin(), peer->paths.end(), [&](const UdpPath& path) {
        return path.remote_listen == packet.destination && path.remote_qpn == packet.qpn;
      });
      // The peer's socket was open before this rank heard of it, and stays open until the peer's process ends.
      if (its == peer->paths.end()) continue;
      its->error = ECONNREFUSED;
      if (!its->flow) continue;  // the trial judges that, or another family took its place
      trace::port_error(rank_, peer->rank, its->index, trace::PortError::refused, ECONNREFUSED);
      peer->is_gone |= peer->lane->flow().ended();
      if (peer->refused != nullptr) continue;
      peer->refused = &*its;
      peer->refused_us = now_us;
      agenda_.wake(peer->member);
    }
  }
}

bool UdpPort::send_from(Peer& peer, uint64_t now_us) {
  if (peer.trial && peer.trial->has_due()) send_probes(peer, now_us);
  flow::Flow& flow = peer.lane->flow();
  // A peer that left may have sent the last that this rank waits for, and its goodbye, before its sockets closed.
  if (peer.is_refused() && read_until_us_ > peer.refused_us) {
    peer.is_gone = true;
    flow.on_peer_failed("is gone: nobody listens at " + text_of(peer.refused->remote_listen) + " any more");
  }
  if (read_until_us_ >= flow.next_timeout_us()) flow.on_timeout(now_us);
  bool sent = false;
  uint32_t path = 0;
  // A control that goes the way of data goes behind it, which saves a system call at both ends. With several paths it
  // mostly goes another way.
  UdpPath* const only_way = peer.used.size() == 1 && !peer.used[0]->is_over_mtu ? peer.used[0] : nullptr;
  std::array<std::array<std::byte, flow::CONTROL_MAX_BYTES>, 2> buffers;
  std::span<const std::byte> waiting;
  for (size_t turn = 0; const size_t size_bytes = flow.poll_control(now_us, buffers[turn], path); turn ^= 1) {
    std::span<const std::byte> control = std::span(buffers[turn]).first(size_bytes);
    if (only_way != nullptr) std::swap(control, waiting);
    if (!control.empty()) peer.used[path]->sender->send_control(*peer.used[path], control);
    sent = true;
    if (peer.used[path]->sender->is_blocked()) return true;
  }
  std::array<flow::DataOut, UdpSender::BATCH_MAX_PACKETS> packets;
  const size_t count = flow.poll_data(now_us, std::span(packets).first(peer.batch_packets), path);
  const auto batch = std::span(packets).first(count);
  const bool takes_along = !waiting.empty() && count != 0 && UdpSender::takes_along(*only_way, batch, waiting.size());
  if (count != 0) {
    UdpPath& way = *peer.used[path];
    way.sender->take_over_mtu();  // of a trial, or of another peer's batch
    way.sender->send_data(way, batch, takes_along ? waiting : std::span<const std::byte>());
    if (way.sender->take_over_mtu()) {
      note_over_mtu(peer, way, now_us);
    } else if (way.is_over_mtu && packets[0].size_bytes == peer.payload_bytes) {
      way.is_over_mtu = false;
    }
    sent = true;
  }
  if (!waiting.empty() && !takes_along) only_way->sender->send_control(*only_way, waiting);
  return sent;
}

// A route changed, and packets of the agreed size no longer fit. Other paths may still take them. If none does, nothing
// would arrive as long as the kernel remembers the report (10 minutes by default).
void UdpPort::note_over_mtu(Peer& peer, UdpPath& path, uint64_t now_us) {
  path.is_over_mtu = true;
  flow::Flow& flow = peer.lane->flow();
  flow.on_path_failed(now_us, path.index);
  if (!std::all_of(peer.used.begin(), peer.used.end(), [](const UdpPath* one) { return one->is_over_mtu; })) return;
  const size_t header_bytes = path.source.is_ipv6 ? 48 : 28;  // IP and UDP
  std::string reason = "cannot be sent packets of " +
                       std::to_string(header_bytes + wire::data_packet_bytes(peer.payload_bytes)) +
                       " bytes any more, the size that this group agreed on: the path " + text_of(path.source) +
                       " -> " + text_of(path.remote_listen) + " has become too narrow";
  if (const uint32_t mtu_bytes = path.sender->path_mtu_bytes())
    reason += " (its MTU is " + std::to_string(mtu_bytes) + ")";
  reason += "; make the group again, or raise the MTU";
  send_abort(peer, "rank " + std::to_string(peer.rank) + " " + reason);  // the flow says nothing more
  flow.on_peer_failed(reason);
}

void UdpPort::check_on_peers(uint64_t now_us) {
  if (now_us >= look_at_us_) look_for_refusals(now_us);
  look_at_us_ = std::max(look_at_us_, now_us + REFUSALS_US);
}

// The next question may take another path, so the answer to the last one is fetched now.
void UdpPort::look_for_refusals(uint64_t now_us) {
  for (const auto& rail : rails_)
    for (const auto& sender : rail->senders)
      if (sender->look_for_refusals()) note_refused(*sender, now_us);
}

void UdpPort::send_abort(Peer& peer, std::string_view reason) {
  std::array<std::byte, flow::CONTROL_MAX_BYTES> payload;
  flow::ControlWriter writer(payload);
  writer.header.flags = flow::CONTROL_ABORT;
  writer.add_reason(utf8_prefix(reason, flow::REASON_MAX_BYTES));
  const auto abort = std::span(payload).first(writer.finish());
  for (UdpPath* path : std::span(peer.used).first(peer.rail_count)) path->sender->send_control(*path, abort);
}

// Flows that have ended send nothing on their own, so this repeats the last notice. A peer that lives and has not heard
// of the end hears it now, and the kernel reports peers that are gone. It uses every rail, because some may be dead.
std::vector<uint32_t> UdpPort::find_gone(uint64_t now_us) {
  std::vector<uint32_t> gone;
  for (Peer* peer : connected_)
    if (!peer->is_gone && peer->lane->flow().ended()) send_abort(*peer, farewell_);
  look_for_refusals(now_us);
  for (const Peer* peer : connected_)
    if (peer->is_gone) gone.push_back(peer->rank);
  return gone;
}

uint64_t UdpPort::next_timeout_us() const {
  uint64_t earliest_us = agenda_.next_due_us();
  for (const uint32_t member : agenda_.ready()) {
    if (connected_[member]->is_refused()) return last_now_us_;
    earliest_us = std::min(earliest_us, connected_[member]->lane->flow().next_timeout_us());
  }
  for (const auto& rail : rails_)
    for (const auto& sender : rail->senders)
      if (sender->is_blocked()) return last_now_us_ + BLOCKED_RETRY_US;
  return earliest_us;
}

void UdpPort::append_poll_fds(std::vector<pollfd>& out) const {
  for (const auto& rail : rails_) out.push_back({rail->receiver->socket().fd(), POLLIN, 0});
}

bool UdpPort::idle() const {
  return std::all_of(connected_.begin(), connected_.end(), [](const Peer* peer) { return peer->lane->idle(); });
}

void UdpPort::abort(std::string_view reason) {
  farewell_ = reason;
  for (Peer* peer : connected_) peer->lane->abort(reason);
  send_farewells(last_now_us_);
}

void UdpPort::close() {
  for (Peer* peer : connected_) peer->lane->flow().close();
  send_farewells(last_now_us_);
}

void UdpPort::revoke() noexcept {
  for (Peer* peer : connected_) peer->lane->revoke();
}

void UdpPort::send_farewells(uint64_t now_us) {
  // Nobody acknowledges these packets. The flow knows how many there are, and a few rounds send them all.
  constexpr int FAREWELL_ROUND_COUNT = 8;
  for (int round = 0; round < FAREWELL_ROUND_COUNT && send_round(now_us); ++round) {
  }
}

CounterList UdpPort::counters() const {
  flow::FlowCounters sum{};
  for (const Peer* peer : connected_) add_to_totals(sum, peer->lane->flow().counters());
  UdpReceiveCounters received = *receive_counters_;
  received.refused[static_cast<size_t>(wire::Refusal::bad_key)] += sum.bad_key;
  received.refused[static_cast<size_t>(wire::Refusal::bad_range)] += sum.bad_range;
  received.refused[static_cast<size_t>(wire::Refusal::bad_slot)] += sum.bad_slot;
  CounterList out;
  append_counters(out, *send_counters_);
  append_counters(out, received);
  std::erase_if(out, [](const auto& counter) { return counter.first == wire::name(wire::Refusal::none); });
  append_totals(out, sum);
  return out;
}

std::string UdpPort::describe() const {
  std::string out = "udp";
  for (const RoceOffer::Rail& rail : offer_.rails) {
    out.append(" ").append(text_of(rail.listen));
    out.append(" (").append(std::to_string(rail.payload_max_bytes)).append(" bytes a packet)");
  }
  out.append(", ").append(send_.describe()).append(", ");
  return out.append(std::to_string(connected_.size())).append(" peers");
}

}  // namespace sennit
