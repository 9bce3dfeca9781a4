// SPDX-License-Identifier: Apache-2.0
#include "ports/verbs_port.hpp"

#include <arpa/inet.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>

#include "flow/control.hpp"
#include "flow/immediate.hpp"
#include "ports/interfaces.hpp"
#include "ports/verbs_path.hpp"
#include "ports/verbs_queue_pair.hpp"
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
      if (!path.adapter->exposure().begin_reading(packet.payload, packet.size_bytes, held[count].id, key)) {
        ++counters_->send_dropped;  // it could not be registered: failure() says why
        continue;
      }
      entries[count] = {reinterpret_cast<uintptr_t>(packet.payload), packet.size_bytes, key};
      held[count].kind = Held::Kind::source;
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

// A device reports nothing of a peer that is gone. A peer that lives and has not heard of the end hears it now.
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

}  // namespace sennit
