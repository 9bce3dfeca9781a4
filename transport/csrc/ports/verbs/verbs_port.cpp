// SPDX-License-Identifier: Apache-2.0
#include "ports/verbs/verbs_port.hpp"

#include <arpa/inet.h>
#include <poll.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>

#include "flow/control.hpp"
#include "flow/immediate.hpp"
#include "ports/interfaces.hpp"
#include "ports/verbs/verbs_queue_pair.hpp"
#include "wire/packet.hpp"
#include "wire/utf8.hpp"

namespace sennit {
namespace {

constexpr int ROUND_MAX_COUNT = 4;
constexpr size_t SEND_BUFFER_COUNT = 512;
constexpr uint64_t EVENTS_US = 1'000;
// How long to wait for transfers of user memory when a group ends. The device takes microseconds.
constexpr std::chrono::milliseconds END_MAX{1'000};

}  // namespace

// One of our queue pairs, and where it leads.
struct VerbsPort::Path {
  VerbsQueuePair queue;
  VerbsAdapter* adapter = nullptr;  // the device that has it
  uint16_t number = 0;              // in paths_
  uint32_t rail = 0;                // ours
  uint8_t generation = 0;           // revivals
  bool is_broken = false;           // its queue pair is in error
  flow::Flow* flow = nullptr;       // once the trial is over
  uint32_t index = 0;               // the trial's and the flow's name for it
  int error = 0;                    // errno of the trial
  wire::Endpoint source{}, remote_source{}, remote_listen{};
  Peer* peer = nullptr;  // once its queue pair is connected
  uint64_t read = 0;     // the source of memory of its newest packet
};

struct VerbsPort::Peer {
  uint32_t rank = 0;
  RoceOffer offer;  // the peer's
  LaneSink* sink = nullptr;
  std::vector<Path*> paths;        // by the flow's index
  size_t rail_count = 0;           // path p uses rail p mod rail_count
  std::unique_ptr<Trial> trial;    // null: not tried
  std::unique_ptr<FlowLane> lane;  // null until the trial is over
  uint64_t eager_address = 0;      // key of our own ring, which no packet names
  uint32_t payload_max_bytes = 0;  // of a packet; once there is a lane, what the trial found
};

bool has_verbs() { return true; }

std::unique_ptr<DevicePort> open_verbs(uint32_t rank, uint32_t size, const VerbsConfig& config) {
  return std::make_unique<VerbsPort>(rank, size, config);
}

VerbsPort::VerbsPort(uint32_t rank, uint32_t size, const VerbsConfig& config)
    : rank_(rank),
      config_(config),
      send_buffers_(SEND_BUFFER_COUNT, flow::CONTROL_MAX_BYTES),
      counters_(config.counter_page) {
  if (size < 1 || rank >= size)
    throw std::invalid_argument("verbs: rank " + std::to_string(rank) + " is not below the size " +
                                std::to_string(size));
  config.check("verbs", config.addresses.size());
  const uint32_t peer_count = std::max(size, 2u) - 1;
  const size_t place_count = size_t{peer_count} * config.addresses.size();
  if (place_count > UINT16_MAX)
    throw std::invalid_argument("verbs: " + std::to_string(config.addresses.size()) + " rails to " +
                                std::to_string(peer_count) + " peers; " + std::to_string(UINT16_MAX) +
                                " queue pairs are allowed");
  config_.path_count = path_count(place_count, config.path_count);
  open_adapters(peer_count);
  make_offer(size);
  peers_.resize(size);
  eager_memory_.resize(size);
  for_peers_.resize(size);
  for (uint32_t peer = 0; peer < size; ++peer) {
    for_peers_[peer].qpns.assign(rails_.size() * config_.path_count, 0);
    if (peer != rank) make_paths(peer);
  }
  for (size_t buffer = send_buffers_.count(); buffer-- > 0;) free_buffers_.push_back(buffer);
}

VerbsPort::~VerbsPort() = default;

void VerbsPort::open_adapters(uint32_t peer_count) {
  const VerbsLibrary& library = config_.library != nullptr ? *config_.library : VerbsLibrary::system();
  const std::vector<VerbsDevicePort> known = find_verbs_ports(library);
  for (const std::string& address : config_.addresses) rails_.push_back({choose_verbs_address(known, address)});
  for (Rail& rail : rails_) {
    const auto is_its = [&](const Rail& other) { return other.address.device == rail.address.device; };
    const auto first = std::find_if(rails_.begin(), rails_.end(), is_its);
    if (&*first != &rail) {
      rail.adapter = first->adapter;
      continue;
    }
    const auto number = static_cast<uint32_t>(adapters_.size());
    if (number == flow::Keys::MAX_COUNT)
      throw std::invalid_argument("verbs: the rails belong to more than " + std::to_string(number) +
                                  " devices; allowed: " + std::to_string(number));
    const auto rail_count = static_cast<size_t>(std::count_if(rails_.begin(), rails_.end(), is_its));
    const VerbsAdapter::Need need{rank_, peer_count, size_t{peer_count} * rail_count * config_.path_count,
                                  config_.service};
    adapters_.push_back(std::make_unique<VerbsAdapter>(library, rail.address, number, need));
    VerbsAdapter& adapter = *adapters_.back();
    rail.adapter = &adapter;
    send_buffers_.register_with(adapter.registrations());
    exposure_.add(adapter.exposure());
    releases_.push_back([this, &adapter](const VerbsQueuePair::Held& held) { let_go(adapter, held); });
  }
}

void VerbsPort::let_go(VerbsAdapter& adapter, const VerbsQueuePair::Held& held) {
  if (held.kind == VerbsQueuePair::Held::Kind::buffer) free_buffers_.push_back(held.id);
  if (held.kind == VerbsQueuePair::Held::Kind::source) adapter.exposure().end_reading(held.id);
}

void VerbsPort::make_offer(uint32_t size) {
  offer_.rank = rank_;
  offer_.size = size;
  offer_.is_device = true;
  offer_.is_reliable = config_.service == VerbsService::rc;
  offer_.path_count = config_.path_count;
  offer_.eager_slot_count = EAGER_SLOT_COUNT;
  // If only one device is left, everything comes in through it.
  offer_.receive_window_bytes = UINT64_MAX;
  for (const auto& adapter : adapters_)
    offer_.receive_window_bytes = std::min(offer_.receive_window_bytes, adapter->receive_window_bytes());
  std::random_device random;
  const std::vector<Interface> interfaces = read_interfaces();
  for (const Rail& rail : rails_) {
    RoceOffer::Rail& offered = offer_.rails.emplace_back();
    offered.listen = rail.address.endpoint;
    offered.prefix_bits = facts_of(interfaces, rail.address.endpoint).prefix_bits;
    offered.device = static_cast<uint8_t>(rail.adapter->number());
    offered.interface = static_cast<uint8_t>(offer_.rails.size() - 1);
    offered.payload_max_bytes = rail.address.mtu_bytes;
    while (offered.entropies.size() < config_.path_count) {
      const auto port = static_cast<uint16_t>(wire::ENTROPY_PORT_MIN | random());
      if (std::find(offered.entropies.begin(), offered.entropies.end(), port) == offered.entropies.end())
        offered.entropies.push_back(port);
    }
  }
}

void VerbsPort::make_paths(uint32_t peer) {
  std::vector<uint32_t>& qpns = for_peers_[peer].qpns;
  for (size_t entry = 0; entry < qpns.size(); ++entry) {
    const auto rail = static_cast<uint32_t>(entry / config_.path_count);
    VerbsAdapter& adapter = *rails_[rail].adapter;
    paths_.push_back(std::make_unique<Path>(Path{adapter.make_queue_pair(), &adapter}));
    Path& path = *paths_.back();
    path.number = static_cast<uint16_t>(paths_.size() - 1);
    path.rail = rail;
    qpns[entry] = path.queue.number();
    paths_by_qpn_[uint64_t{adapter.number()} << 32 | qpns[entry]] = &path;
  }
}

VerbsPort::Path* VerbsPort::find_path(const VerbsAdapter& adapter, uint32_t qpn) const {
  const auto known = paths_by_qpn_.find(uint64_t{adapter.number()} << 32 | qpn);
  return known != paths_by_qpn_.end() ? known->second : nullptr;
}

void VerbsPort::borrow(const void* address, size_t size_bytes) {
  size_t borrowed = 0;
  try {
    for (; borrowed < adapters_.size(); ++borrowed) adapters_[borrowed]->registrations().borrow(address, size_bytes);
  } catch (...) {
    while (borrowed-- > 0) adapters_[borrowed]->registrations().give_back(address, size_bytes);
    throw;
  }
}

void VerbsPort::give_back(const void* address, size_t size_bytes) {
  for (const auto& adapter : adapters_) adapter->registrations().give_back(address, size_bytes);
}

Lane& VerbsPort::lane(uint32_t peer) {
  if (peer >= peers_.size() || peers_[peer] == nullptr || peers_[peer]->lane == nullptr)
    throw std::out_of_range("verbs: rank " + std::to_string(peer) + " is not connected");
  return *peers_[peer]->lane;
}

void VerbsPort::fail(std::string reason, uint32_t event) {
  trace::port_error(rank_, trace::NO_PEER, trace::NO_PATH, trace::PortError::device, event);
  if (failure_.empty()) failure_ = std::move(reason);
}

std::string_view VerbsPort::failure() const { return failure_.empty() ? exposure_.failure() : failure_; }

// How a verbs port connects to its peers: queue pairs from both offers, a trial of them, and a flow over those that
// work.

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

// What a verbs port does in a round: it receives, hands over what arrived, and sends.

bool VerbsPort::progress(uint64_t now_us) {
  // Acknowledgements are timed, so each batch gets its time of arrival.
  const flow::CallClock clock(now_us);
  exposure_.set_now(now_us);
  agenda_.set_now(now_us);
  bool moved = false;
  for (int round = 0; round < ROUND_MAX_COUNT; ++round) {
    const bool received = poll_completions(clock.now_us());
    bool delivered = false;
    for (size_t turn = 0; turn < agenda_.ready().size(); ++turn)
      delivered |= connected_[agenda_.ready()[turn]]->lane->pump(clock.now_us());
    const bool sent = send_round(clock.now_us());
    if (!received && !delivered && !sent) break;
    moved = true;
  }
  last_now_us_ = clock.now_us();
  if (last_now_us_ >= look_at_us_) {
    look_at_us_ = last_now_us_ + EVENTS_US;
    poll_events(last_now_us_);
  }
  if (last_now_us_ >= revive_at_us_) revive_paths(last_now_us_);
  return moved || arm();
}

// Nobody waits for a path whose port is down: what it still holds may never leave.
bool VerbsPort::has_room(const Peer& peer) const {
  if (free_buffers_.size() < BATCH_MAX_PACKETS + 1) return false;
  return std::all_of(peer.paths.begin(), peer.paths.end(), [this](const Path* path) {
    return path->queue.room() > BATCH_MAX_PACKETS || !rails_[path->rail].is_up;
  });
}

bool VerbsPort::is_usable(const Path& path) const {
  return path.queue.is_ready() && rails_[path.rail].is_up && path.queue.room() > BATCH_MAX_PACKETS;
}

bool VerbsPort::send_round(uint64_t now_us) {
  bool sent = false;
  agenda_.wake_due(now_us);
  const size_t ready_count = agenda_.ready().size();
  for (size_t turn = 0; turn < ready_count; ++turn)
    sent |= send_from(*connected_[agenda_.ready()[(next_turn_ + turn) % ready_count]], now_us);
  ++next_turn_;
  agenda_.settle(now_us, [this](uint32_t member) {
    const Peer& peer = *connected_[member];
    return peer.trial && peer.trial->has_due() ? 0 : peer.lane->next_visit_us();
  });
  return sent;
}

bool VerbsPort::send_from(Peer& peer, uint64_t now_us) {
  if (peer.trial && peer.trial->has_due()) send_probes(peer, now_us);
  flow::Flow& flow = peer.lane->flow();
  if (now_us >= flow.next_timeout_us()) flow.on_timeout(now_us);
  bool sent = false;
  uint32_t path = 0;
  for (;;) {
    if (!has_room(peer)) {  // until completions come
      ++counters_->send_blocked;
      return sent;
    }
    const size_t buffer = take_buffer();
    const size_t size_bytes = flow.poll_control(now_us, send_buffers_[buffer], path);
    if (size_bytes == 0) {
      free_buffers_.push_back(buffer);
      break;
    }
    send_control(*peer.paths[path], buffer, size_bytes);
    sent = true;
  }
  std::array<flow::DataOut, BATCH_MAX_PACKETS> packets;
  if (const size_t count = flow.poll_data(now_us, packets, path)) {
    send_data(*peer.paths[path], std::span(packets).first(count));
    sent = true;
  }
  return sent;
}

size_t VerbsPort::take_buffer() {
  const size_t buffer = free_buffers_.back();
  free_buffers_.pop_back();
  return buffer;
}

uint64_t VerbsPort::name_of(const Path& path) const {
  return request_name(VerbsRequest::send, path.generation, path.number);
}

void VerbsPort::send_control(Path& path, size_t buffer, size_t size_bytes) {
  const VerbsQueuePair::Held held{VerbsQueuePair::Held::Kind::buffer, buffer};
  if (!is_usable(path)) {
    ++counters_->send_dropped;
    let_go(*path.adapter, held);
    return;
  }
  ibv_sge entry = send_buffers_.entry(buffer, size_bytes, path.adapter->number());
  ibv_send_wr request{};
  request.wr_id = name_of(path);
  request.sg_list = &entry;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  ++counters_->send_calls;
  path.queue.post(&request, std::span(&held, 1));
  if (!path.queue.is_ready()) on_path_error(path, trace::PortError::queue_pair, 0, last_now_us_);
}

void VerbsPort::send_data(Path& path, std::span<const flow::DataOut> packets) {
  using Held = VerbsQueuePair::Held;
  if (!is_usable(path)) {
    counters_->send_dropped += packets.size();
    return;
  }
  std::array<ibv_send_wr, BATCH_MAX_PACKETS> requests{};
  std::array<ibv_sge, BATCH_MAX_PACKETS> entries{};
  std::array<Held, BATCH_MAX_PACKETS> held{};
  size_t count = 0;
  for (const flow::DataOut& packet : packets) {
    ibv_send_wr& request = requests[count];
    const bool is_eager =
        flow::slot_of(packet.immediate) == flow::EAGER_SLOT || packet.immediate == flow::PROBE_IMMEDIATE;
    if (is_eager) {  // its memory is used again before the device may have read it
      const size_t buffer = take_buffer();
      std::memcpy(send_buffers_[buffer].data(), packet.payload, packet.size_bytes);
      entries[count] = send_buffers_.entry(buffer, packet.size_bytes, path.adapter->number());
      held[count] = {Held::Kind::buffer, buffer};
    } else if (packet.size_bytes != 0) {
      uint32_t key = 0;
      if (!path.adapter->exposure().begin_reading(packet.payload, packet.size_bytes, path.read, key)) {
        ++counters_->send_dropped;  // it could not be registered: failure() says why
        continue;
      }
      entries[count] = {reinterpret_cast<uintptr_t>(packet.payload), packet.size_bytes, key};
      held[count] = {Held::Kind::source, path.read};
    }
    request.wr_id = name_of(path);
    request.sg_list = &entries[count];
    request.num_sge = packet.size_bytes != 0 ? 1 : 0;
    request.imm_data = htonl(packet.immediate);
    // A device puts eager packets into memory that it chooses, not into a ring that a late copy could reach.
    request.opcode = is_eager && path.peer->offer.is_device ? IBV_WR_SEND_WITH_IMM : IBV_WR_RDMA_WRITE_WITH_IMM;
    request.wr.rdma = {packet.remote_address, packet.rkey};
    if (count != 0) requests[count - 1].next = &request;
    ++count;
  }
  if (count == 0) return;
  ++counters_->send_calls;
  path.queue.post(&requests[0], std::span(held).first(count));
  if (!path.queue.is_ready()) on_path_error(path, trace::PortError::queue_pair, 0, last_now_us_);
}

// A device does not report peers that are gone, so the result is empty. A peer that lives and has not heard of the end
// hears it now.
std::vector<uint32_t> VerbsPort::find_gone(uint64_t) {
  for (Peer* peer : connected_) {
    if (!peer->lane->flow().ended() || !has_room(*peer)) continue;
    // Uses every rail, because some may be dead.
    for (Path* path : std::span(peer->paths).first(peer->rail_count)) {
      const size_t buffer = take_buffer();
      flow::ControlWriter writer(send_buffers_[buffer]);
      writer.header.flags = flow::CONTROL_ABORT;
      writer.add_reason(utf8_prefix(farewell_, flow::REASON_MAX_BYTES));
      send_control(*path, buffer, writer.finish());
    }
  }
  poll_completions(last_now_us_);
  return {};
}

uint64_t VerbsPort::next_timeout_us() const {
  uint64_t earliest_us = std::min(revive_at_us_, agenda_.next_due_us());
  for (const uint32_t member : agenda_.ready()) {
    const Peer& peer = *connected_[member];
    // Without room there is nothing to do until completions come.
    if (has_room(peer)) earliest_us = std::min(earliest_us, peer.lane->flow().next_timeout_us());
  }
  return earliest_us;
}

void VerbsPort::append_poll_fds(std::vector<pollfd>& out) const {
  for (const auto& adapter : adapters_) adapter->append_poll_fds(out);
}

bool VerbsPort::idle() const {
  return std::all_of(connected_.begin(), connected_.end(), [](const Peer* peer) { return peer->lane->idle(); });
}

void VerbsPort::abort(std::string_view reason) {
  farewell_ = reason;
  for (Peer* peer : connected_) peer->lane->abort(reason);
  send_farewells(last_now_us_);
}

void VerbsPort::close() {
  for (Peer* peer : connected_) peer->lane->flow().close();
  send_farewells(last_now_us_);
}

void VerbsPort::revoke() noexcept {
  if (is_cut_off_) return;
  for (Peer* peer : connected_) peer->lane->revoke();
  try {
    const auto give_up = std::chrono::steady_clock::now() + END_MAX;
    while (!exposure_.close_all() && failure().empty() && std::chrono::steady_clock::now() < give_up)
      poll_completions(last_now_us_);
    if (exposure_.close_all()) return;
  } catch (const std::exception&) {
  }
  // The device does not answer, or memory is short. A queue pair that is reset moves nothing in or out.
  is_cut_off_ = true;
  for (const auto& path : paths_) path->queue.stop(releases_[path->adapter->number()]);
}

void VerbsPort::send_farewells(uint64_t now_us) {
  // Nobody acknowledges these packets. The flow knows how many there are, and a few rounds send them all.
  constexpr int FAREWELL_ROUND_COUNT = 8;
  for (int round = 0; round < FAREWELL_ROUND_COUNT && send_round(now_us); ++round) poll_completions(now_us);
}

CounterList VerbsPort::counters() const {
  VerbsExposureCounters keys;
  uint64_t registrations = 0, hits = 0, evictions = 0, registered_bytes = 0;
  for (const auto& adapter : adapters_) {
    const VerbsExposureCounters& one = adapter->exposure().counters();
    keys.windows += one.windows;
    keys.binds += one.binds;
    keys.message_registrations += one.message_registrations;
    keys.keys_reused_early += one.keys_reused_early;
    registrations += adapter->registrations().registrations();
    hits += adapter->registrations().hits();
    evictions += adapter->registrations().evictions();
    registered_bytes += adapter->registrations().registered_bytes();
  }
  flow::FlowCounters sum{};
  for (const Peer* peer : connected_) add_to_totals(sum, peer->lane->flow().counters());
  Counters own = *counters_;
  own.bad_slot += sum.bad_slot;
  CounterList out = {
      {"memory_windows", keys.windows},
      {"memory_binds", keys.binds},
      {"message_registrations", keys.message_registrations},
      {"keys_reused_early", keys.keys_reused_early},
      {"registrations", registrations},
      {"registration_hits", hits},
      {"registrations_evicted", evictions},
      {"registered_bytes", registered_bytes},
  };
  append_counters(out, own);
  append_totals(out, sum);
  out.insert(out.end(), {{"bad_key", sum.bad_key}, {"bad_range", sum.bad_range}});
  return out;
}

std::string VerbsPort::describe() const {
  std::string out = "verbs";
  for (const Rail& rail : rails_) out.append(" ").append(sennit::describe(rail.address));
  out.append(config_.service == VerbsService::rc ? ", RC, " : ", UC, ");
  const bool uses_windows = std::all_of(adapters_.begin(), adapters_.end(),
                                        [](const auto& adapter) { return adapter->exposure().uses_windows(); });
  out.append(uses_windows ? "a memory window a message, " : "a registration a message, ");
  out.append(config_.describe()).append(", ");
  return out.append(std::to_string(connected_.size())).append(" peers");
}

// The verbs port's completions: sends that left, packets that arrived, binds that are done.

namespace {

constexpr int COMPLETIONS_PER_POLL = 64, POLL_MAX_COUNT = 4;

}  // namespace

bool VerbsPort::poll_completions(uint64_t now_us) {
  bool found = false;
  for (const auto& adapter : adapters_) found |= poll_completions(*adapter, now_us);
  return found;
}

bool VerbsPort::poll_completions(VerbsAdapter& adapter, uint64_t now_us) {
  std::array<ibv_wc, COMPLETIONS_PER_POLL> completions;
  bool found = false;
  for (int turn = 0; turn < POLL_MAX_COUNT; ++turn) {
    const int count = adapter.poll(completions);
    if (count < 0) fail("verbs: " + adapter.name() + ": its completion queue cannot be read");
    for (int index = 0; index < count; ++index) on_completion(adapter, completions[static_cast<size_t>(index)], now_us);
    found |= count > 0;
    if (count < COMPLETIONS_PER_POLL) break;
  }
  if (!adapter.post_receives()) fail("verbs: " + adapter.name() + " takes no receive buffers any more");
  return found;
}

void VerbsPort::on_completion(VerbsAdapter& adapter, const ibv_wc& completion, uint64_t now_us) {
  switch (request_kind(completion.wr_id)) {
    case VerbsRequest::send: {
      Path& path = *paths_[request_path(completion.wr_id)];
      if (request_generation(completion.wr_id) != path.generation) return;
      if (completion.status == IBV_WC_SUCCESS) {
        path.queue.on_sent(request_number(completion.wr_id), releases_[adapter.number()]);
      } else {
        on_path_error(path, trace::PortError::completion, completion.status, now_us);
      }
      return;
    }
    case VerbsRequest::bind:
      adapter.exposure().on_bound(completion.status);
      return;
    case VerbsRequest::receive:
      adapter.give_back(request_number(completion.wr_id));
      on_receive(adapter, completion, now_us);
      return;
  }
}

void VerbsPort::on_receive(VerbsAdapter& adapter, const ibv_wc& completion, uint64_t now_us) {
  Path* const known = find_path(adapter, completion.qp_num);
  if (known == nullptr || known->peer == nullptr) {
    ++counters_->unknown_qpn;
    return;
  }
  Path& path = *known;
  if (completion.status != IBV_WC_SUCCESS) {
    // With UC the device drops only this message and goes on (IBTA, class D fault).
    completion.status == IBV_WC_REM_ACCESS_ERR ? ++counters_->remote_access_errors : ++counters_->receive_errors;
    trace::port_error(rank_, path.peer->rank, path.index, trace::PortError::receive, completion.status);
    if (completion.status == IBV_WC_WR_FLUSH_ERR || config_.service == VerbsService::rc)
      on_path_error(path, trace::PortError::completion, completion.status, now_us);
    return;
  }
  const uint32_t immediate = ntohl(completion.imm_data);
  const auto buffer = adapter.received(request_number(completion.wr_id));
  const auto payload = buffer.first(std::min<size_t>(completion.byte_len, buffer.size()));
  const bool is_bulk = completion.opcode == IBV_WC_RECV_RDMA_WITH_IMM;
  const bool has_immediate = (completion.wc_flags & IBV_WC_WITH_IMM) != 0;
  if (!is_bulk && has_immediate && immediate == flow::PROBE_IMMEDIATE) {
    if (path.peer->trial) path.peer->trial->on_probe(now_us, path.index, payload);
    if (path.flow != nullptr) path.flow->on_heard(now_us);  // and the answer is due
    return;
  }
  if (path.flow == nullptr) {  // the peer is ahead of this rank
    ++counters_->unknown_qpn;
    return;
  }
  if (is_bulk) {
    // The device has checked key and range. An immediate that names an eager packet does not belong in bulk memory.
    if (flow::slot_of(immediate) == flow::EAGER_SLOT) {
      ++counters_->bad_slot;
    } else {
      path.flow->on_data(now_us, path.index, immediate, completion.byte_len);
    }
    return;
  }
  if (has_immediate) {
    on_eager(path, immediate, payload, now_us);
  } else {
    path.flow->on_control(now_us, path.index, payload);
  }
}

// The packet is in memory that the device chose. It is placed into the flow's ring as in the udp port, so a late copy
// finds nothing to overwrite.
void VerbsPort::on_eager(Path& path, uint32_t immediate, std::span<const std::byte> payload, uint64_t now_us) {
  if (flow::slot_of(immediate) != flow::EAGER_SLOT) {
    ++counters_->bad_slot;
    return;
  }
  const uint32_t slot = flow::index_of(immediate) % EAGER_SLOT_COUNT;
  const uint64_t address = path.peer->eager_address + uint64_t{slot} * path.peer->payload_max_bytes;
  const auto size_bytes = static_cast<uint32_t>(payload.size());
  flow::Placement place{};
  const flow::Verdict verdict = path.flow->locate(immediate, address, 0, size_bytes, place);
  if (verdict != flow::Verdict::place && verdict != flow::Verdict::duplicate) return;  // the flow has counted it
  if (place.destination != nullptr) std::memcpy(place.destination, payload.data(), payload.size());
  path.flow->on_data(now_us, path.index, immediate, size_bytes);
}

// Asks for events before a sleep. True if something came in between.
bool VerbsPort::arm() {
  bool found = false;
  for (const auto& adapter : adapters_) {
    switch (adapter->arm()) {
      case VerbsAdapter::Armed::before:
        break;
      case VerbsAdapter::Armed::now:
        found |= poll_completions(*adapter, last_now_us_);
        break;
      case VerbsAdapter::Armed::failed:
        fail("verbs: " + adapter->name() + " announces no completions any more");
        break;
    }
  }
  return found;
}

// Translates the device's events into what the flows understand: paths that fail, and paths to try again.

namespace {

// A queue pair in error is brought up again, repeatedly while the cause lasts. The pause grows between these limits.
constexpr uint64_t REVIVE_FIRST_US = 1'000, REVIVE_MAX_US = 1'000'000;

}  // namespace

void VerbsPort::poll_events(uint64_t now_us) {
  ibv_async_event event;
  for (const auto& adapter : adapters_) {
    while (adapter->next_event(event)) {
      on_event(*adapter, event, now_us);
      adapter->acknowledge(event);
    }
  }
}

void VerbsPort::on_event(VerbsAdapter& adapter, const ibv_async_event& event, uint64_t now_us) {
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
      if (Path* const path = find_path(adapter, event.element.qp->qp_num)) {
        on_path_error(*path, trace::PortError::queue_pair, event.event_type, now_us);
      } else {
        fail("verbs: " + adapter.name() + ": the queue pair for memory windows failed", event.event_type);
      }
      return;
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_PORT_ACTIVE:
      on_port(adapter, static_cast<uint8_t>(event.element.port_num), event.event_type == IBV_EVENT_PORT_ACTIVE, now_us);
      return;
    case IBV_EVENT_DEVICE_FATAL:
      fail("verbs: " + adapter.name() + " failed or was removed", event.event_type);
      return;
    case IBV_EVENT_CQ_ERR:
    case IBV_EVENT_SRQ_ERR:
      fail("verbs: " + adapter.name() + ": a queue of completions or receives failed", event.event_type);
      return;
    default:
      return;
  }
}

void VerbsPort::on_port(VerbsAdapter& adapter, uint8_t port, bool is_up, uint64_t now_us) {
  ++counters_->port_events;
  const auto is_its = [&](const Rail& rail) { return rail.adapter == &adapter && rail.address.port == port; };
  for (Rail& rail : rails_)
    if (is_its(rail)) rail.is_up = is_up;
  if (is_up) {
    revive_pause_us_ = REVIVE_FIRST_US;
    revive_at_us_ = std::min(revive_at_us_, now_us);
    return;
  }
  trace::port_error(rank_, trace::NO_PEER, trace::NO_PATH, trace::PortError::port_down, IBV_EVENT_PORT_ERR);
  for (const auto& path : paths_)
    if (path->flow != nullptr && is_its(rails_[path->rail])) {
      path->flow->on_path_failed(now_us, path->index);
      // The packet may never leave, and messages wait for it that arrived long ago over other paths.
      if (path->queue.holds_any()) break_off(*path);
    }
}

// Stops the path until it is brought up again, which may take long. What it was to send from is released at once.
void VerbsPort::break_off(Path& path) {
  path.is_broken = true;
  path.queue.stop(releases_[path.adapter->number()]);
}

void VerbsPort::on_path_error(Path& path, trace::PortError where, uint32_t error, uint64_t now_us) {
  if (path.peer == nullptr) return;
  // The device reports an error once for each request that was in the queue.
  if (path.is_broken) return;
  break_off(path);
  ++counters_->path_errors;
  trace::port_error(rank_, path.peer->rank, path.index, where, error);
  if (path.flow != nullptr) {
    path.flow->on_path_failed(now_us, path.index);
  } else {
    path.error = EIO;
  }
  if (revive_at_us_ != UINT64_MAX) return;
  revive_pause_us_ = std::clamp(revive_pause_us_, REVIVE_FIRST_US, REVIVE_MAX_US);
  revive_at_us_ = now_us + revive_pause_us_;
}

void VerbsPort::revive_paths(uint64_t now_us) {
  revive_at_us_ = UINT64_MAX;
  if (is_cut_off_) return;
  bool is_left = false;
  for (const auto& path : paths_) {
    if (!path->is_broken) continue;
    // While the port is down there is nothing to try. The event of the port starts this again.
    if (!rails_[path->rail].is_up) continue;
    ++path->generation;
    if (path->queue.revive(releases_[path->adapter->number()])) {
      path->is_broken = false;
      ++counters_->path_revivals;
      continue;
    }
    // Connecting may wait for the neighbour's address, so at most one failure in each call.
    is_left = true;
    break;
  }
  revive_pause_us_ = is_left ? std::min(2 * revive_pause_us_, REVIVE_MAX_US) : REVIVE_FIRST_US;
  if (is_left) revive_at_us_ = now_us + revive_pause_us_;
}

}  // namespace sennit
