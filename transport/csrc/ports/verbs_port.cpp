// SPDX-License-Identifier: Apache-2.0
#include "ports/verbs_port.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>

#include "flow/control.hpp"
#include "flow/immediate.hpp"
#include "messages/utf8.hpp"
#include "ports/call_clock.hpp"
#include "ports/verbs_path.hpp"
#include "ports/verbs_request.hpp"
#include "wire/packet.hpp"

namespace sennit {
namespace {

constexpr int ROUND_MAX_COUNT = 4;
// Receive buffers: so many a peer, within these bounds. Each packet takes one, if only for its completion.
constexpr size_t RECEIVES_PER_PEER = 512, RECEIVE_MIN_COUNT = 1'024, RECEIVE_MAX_COUNT = 8'192;
constexpr size_t SEND_BUFFER_COUNT = 512;
constexpr uint32_t QUEUE_MIN_DEPTH = 64, QUEUE_MAX_DEPTH = 128, BINDER_DEPTH = 64;
constexpr uint64_t SILENCE_US = 100'000, EVENTS_US = 1'000;
// What is still on its way in or out of user memory when a group ends; the device takes microseconds for it.
constexpr std::chrono::milliseconds END_MAX{1'000};

}  // namespace

VerbsPort::VerbsPort(uint32_t rank, uint32_t size, const VerbsConfig& config)
    : rank_(rank),
      config_(config),
      channel_(nullptr, nullptr),
      completions_(nullptr, nullptr),
      receives_(nullptr, nullptr) {
  if (size < 1 || rank >= size)
    throw std::invalid_argument("verbs: rank " + std::to_string(rank) + " is not below the size " +
                                std::to_string(size));
  config.check("verbs", config.addresses.size());
  const VerbsLibrary& library = config.library != nullptr ? *config.library : VerbsLibrary::system();
  const std::vector<VerbsDevicePort> known = find_verbs_ports(library);
  for (const std::string& address : config.addresses) rails_.push_back(choose_verbs_address(known, address));
  is_rail_up_.assign(rails_.size(), true);
  for (const VerbsAddress& rail : rails_)
    if (rail.device != rails_[0].device)
      throw std::invalid_argument("verbs: " + sennit::describe(rails_[0]) + " and " + sennit::describe(rail) +
                                  " are of two devices; a message has one key, so a rank uses one device: name the "
                                  "addresses of one");
  device_ = std::make_unique<VerbsDevice>(library, rails_[0].device);
  registrations_ = std::make_unique<VerbsRegistrations>(
      *device_, IBV_ACCESS_LOCAL_WRITE | (device_->has_windows() ? IBV_ACCESS_MW_BIND : 0));
  release_ = [this](const VerbsQueuePair::Held& held) {
    if (held.kind == VerbsQueuePair::Held::Kind::buffer) free_buffers_.push_back(held.id);
    if (held.kind == VerbsQueuePair::Held::Kind::loan) exposure_->end_reading(held.id);
  };

  offer_.rank = rank;
  offer_.size = size;
  offer_.is_device = true;
  offer_.is_reliable = config.service == VerbsService::rc;
  offer_.path_count = config.path_count;
  offer_.eager_slot_count = EAGER_SLOT_COUNT;
  std::random_device random;
  for (const VerbsAddress& rail : rails_) {
    RoceOffer::Rail& offered = offer_.rails.emplace_back();
    offered.listen = rail.endpoint;
    offered.payload_max_bytes = rail.mtu_bytes;
    while (offered.entropies.size() < config.path_count) {
      const auto port = static_cast<uint16_t>(wire::ENTROPY_PORT_MIN | random());
      if (std::find(offered.entropies.begin(), offered.entropies.end(), port) == offered.entropies.end())
        offered.entropies.push_back(port);
    }
  }
  open_queues(std::max(size, 2u) - 1);
  open_binder();
  peers_.resize(size);
  eager_memory_.resize(size);
  offer_.peers.resize(size);
  for (uint32_t peer = 0; peer < size; ++peer) {
    std::vector<uint32_t>& qpns = offer_.peers[peer].qpns;
    qpns.assign(rails_.size() * config.path_count, 0);
    if (peer == rank) continue;
    for (size_t entry = 0; entry < qpns.size(); ++entry) {
      paths_.push_back(std::make_unique<Path>(
          Path{VerbsQueuePair(*device_, completions_.get(), receives_.get(), depth_, config.service)}));
      Path& path = *paths_.back();
      path.number = static_cast<uint16_t>(paths_.size() - 1);
      path.rail = static_cast<uint32_t>(entry / config.path_count);
      qpns[entry] = path.queue.number();
      paths_by_qpn_[qpns[entry]] = &path;
    }
  }
}

VerbsPort::~VerbsPort() {
  if (unacknowledged_events_ != 0) device_->library().ack_cq_events(completions_.get(), unacknowledged_events_);
}

void VerbsPort::open_queues(uint32_t peer_count) {
  const VerbsLibrary& library = device_->library();
  const ibv_device_attr& limits = device_->limits();
  const size_t path_count = size_t{peer_count} * rails_.size() * config_.path_count;
  if (path_count > UINT16_MAX || path_count + 1 > static_cast<size_t>(limits.max_qp))
    throw std::invalid_argument("verbs: " + std::to_string(path_count) + " queue pairs are needed for " +
                                std::to_string(peer_count) + " peers, " + device_->name() + " has " +
                                std::to_string(limits.max_qp) + "; choose fewer paths (SENNIT_PATHS)");
  receive_count_ = std::clamp(RECEIVES_PER_PEER * peer_count, RECEIVE_MIN_COUNT, RECEIVE_MAX_COUNT);
  receive_count_ = std::min(receive_count_, static_cast<size_t>(limits.max_srq_wr));
  const size_t for_sends = static_cast<size_t>(limits.max_cqe) -
                           std::min<size_t>(receive_count_ + BINDER_DEPTH, static_cast<size_t>(limits.max_cqe));
  depth_ = static_cast<uint32_t>(std::clamp<size_t>(for_sends / path_count, QUEUE_MIN_DEPTH, QUEUE_MAX_DEPTH));
  const size_t completion_count =
      std::min(receive_count_ + BINDER_DEPTH + path_count * depth_, static_cast<size_t>(limits.max_cqe));

  const auto made = [this](auto* object, const char* what) {
    if (object == nullptr) raise_verbs_error(errno, device_->name() + ": no " + what);
    return object;
  };
  channel_ = {made(library.create_comp_channel(device_->context()), "completion channel"),
              library.destroy_comp_channel};
  if (fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK) != 0)
    raise_verbs_error(errno, device_->name() + ": the completion channel cannot be read without waiting");
  completions_ = {
      made(library.create_cq(device_->context(), static_cast<int>(completion_count), nullptr, channel_.get(), 0),
           "completion queue"),
      library.destroy_cq};
  ibv_srq_init_attr attributes{};
  attributes.attr.max_wr = static_cast<uint32_t>(receive_count_);
  attributes.attr.max_sge = 1;
  receives_ = {made(library.create_srq(device_->domain(), &attributes), "shared receive queue"), library.destroy_srq};
  receive_buffers_ = std::make_unique<VerbsBuffers>(*registrations_, receive_count_, wire::PAYLOAD_MAX_BYTES);
  send_buffers_ = std::make_unique<VerbsBuffers>(*registrations_, SEND_BUFFER_COUNT, flow::CONTROL_MAX_BYTES);
  for (size_t buffer = SEND_BUFFER_COUNT; buffer-- > 0;) free_buffers_.push_back(buffer);
  for (size_t buffer = 0; buffer < receive_count_; ++buffer) repost_.push_back(buffer);
  repost_receives();
  if (!failure_.empty()) throw std::runtime_error(failure_);
  // Half of what is there: controls and eager packets take receives, too.
  offer_.receive_window_bytes = receive_count_ / 2 / peer_count * wire::PAYLOAD_MAX_BYTES;
}

// Binds want a queue pair that can send; it leads back to itself and carries nothing.
void VerbsPort::open_binder() {
  if (device_->has_windows()) {
    binder_ =
        std::make_unique<VerbsQueuePair>(*device_, completions_.get(), receives_.get(), BINDER_DEPTH, config_.service);
    VerbsRoute route;
    route.local = rails_[0];
    route.remote = rails_[0].endpoint;
    route.remote_qpn = binder_->number();
    route.mtu_bytes = rails_[0].mtu_bytes;
    binder_->connect(route);
  }
  exposure_ =
      std::make_unique<VerbsExposure>(*device_, *registrations_, binder_ ? binder_->get() : nullptr, BINDER_DEPTH);
}

void VerbsPort::connect(uint32_t peer, std::span<const std::byte> info, LaneSink& sink) {
  const RoceOffer theirs = RoceOffer::decode(info);
  check_peer("verbs", offer_, peer, peer < peers_.size() && peers_[peer] != nullptr);
  auto [pairs, path_count, flow_config] =
      agree(offer_, peer, theirs, config_, [](const RoceOffer::Rail& ours, const RoceOffer::Rail& other) {
        return std::min(ours.payload_max_bytes, other.payload_max_bytes);
      });
  flow_config.receive_budget = &receive_budget_;

  auto made = std::make_unique<Peer>();
  made->rank = peer;
  made->is_device = theirs.is_device;
  made->rail_count = pairs.size();
  made->payload_max_bytes = flow_config.payload_max_bytes;
  const size_t eager_bytes = size_t{EAGER_SLOT_COUNT} * flow_config.payload_max_bytes;
  eager_memory_[peer] = std::make_unique<std::byte[]>(eager_bytes);
  made->eager_address = reinterpret_cast<uintptr_t>(eager_memory_[peer].get());
  made->lane = std::make_unique<FlowLane>(peer, flow_config, std::span(eager_memory_[peer].get(), eager_bytes), 0,
                                          *exposure_, sink);
  const RoceOffer::Peer& for_us = theirs.peers[rank_];
  made->lane->flow().set_remote_eager(for_us.eager_address, for_us.eager_rkey);
  for (uint32_t path = 0; path < path_count; ++path) {
    for (const auto& [mine, other] : pairs) {
      Path& entry = *paths_by_qpn_.at(offer_.peers[peer].qpns[mine * offer_.path_count + path]);
      VerbsRoute route;
      route.local = rails_[mine];
      route.remote = theirs.rails[other].listen;
      route.remote_qpn = for_us.qpns[other * theirs.path_count + path];
      route.mtu_bytes = flow_config.payload_max_bytes;
      // Of RC both ends must know them: the queue pair numbers are known, and as good as random.
      route.first_psn = entry.queue.number();
      route.expected_psn = route.remote_qpn;
      route.entropy = offer_.rails[mine].entropies[path];
      entry.flow = &made->lane->flow();
      entry.index = static_cast<uint32_t>(made->paths.size());
      entry.peer = made.get();
      entry.queue.connect(route);
      made->paths.push_back(&entry);
    }
  }
  connected_.push_back(made.get());
  peers_[peer] = std::move(made);
}

Lane& VerbsPort::lane(uint32_t peer) {
  if (peer >= peers_.size() || peers_[peer] == nullptr)
    throw std::out_of_range("verbs: rank " + std::to_string(peer) + " is not connected");
  return *peers_[peer]->lane;
}

void VerbsPort::fail(std::string reason) {
  if (failure_.empty()) failure_ = std::move(reason);
}

std::string_view VerbsPort::failure() const { return failure_.empty() ? exposure_->failure() : failure_; }

bool VerbsPort::progress(uint64_t now_us) {
  // Acknowledgements are timed, so each batch gets the time at which it came.
  const CallClock clock(now_us);
  exposure_->set_now(now_us);
  for (Peer* peer : connected_) peer->lane->set_now(now_us);
  bool moved = false;
  for (int round = 0; round < ROUND_MAX_COUNT; ++round) {
    const bool received = poll_completions(clock.now_us());
    bool delivered = false;
    for (Peer* peer : connected_) delivered |= peer->lane->pump(clock.now_us());
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

bool VerbsPort::has_room(const Peer& peer) const {
  if (free_buffers_.size() < BATCH_MAX_PACKETS + 1) return false;
  return std::all_of(peer.paths.begin(), peer.paths.end(),
                     [](const Path* path) { return path->queue.room() > BATCH_MAX_PACKETS; });
}

bool VerbsPort::send_round(uint64_t now_us) {
  bool sent = false;
  for (size_t turn = 0; turn < connected_.size(); ++turn)
    sent |= send_from(*connected_[(next_peer_ + turn) % connected_.size()], now_us);
  if (!connected_.empty()) next_peer_ = (next_peer_ + 1) % connected_.size();
  return sent;
}

bool VerbsPort::send_from(Peer& peer, uint64_t now_us) {
  flow::Flow& flow = peer.lane->flow();
  if (now_us >= flow.next_timeout_us()) flow.on_timeout(now_us);
  bool sent = false;
  uint32_t path = 0;
  for (;;) {
    if (!has_room(peer)) {  // until completions come
      ++counters_.send_blocked;
      return sent;
    }
    const size_t buffer = take_buffer();
    const size_t size_bytes = flow.poll_control(now_us, (*send_buffers_)[buffer], path);
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
  if (!path.queue.is_ready()) {
    ++counters_.send_dropped;
    release_(held);
    return;
  }
  ibv_sge entry = send_buffers_->entry(buffer, size_bytes);
  ibv_send_wr request{};
  request.wr_id = name_of(path);
  request.sg_list = &entry;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  ++counters_.send_calls;
  path.queue.post(&request, std::span(&held, 1));
  if (!path.queue.is_ready()) on_path_error(path, last_now_us_);
}

void VerbsPort::send_data(Path& path, std::span<const flow::DataOut> packets) {
  using Held = VerbsQueuePair::Held;
  if (!path.queue.is_ready()) {
    counters_.send_dropped += packets.size();
    return;
  }
  std::array<ibv_send_wr, BATCH_MAX_PACKETS> requests{};
  std::array<ibv_sge, BATCH_MAX_PACKETS> entries{};
  std::array<Held, BATCH_MAX_PACKETS> held{};
  size_t count = 0;
  for (const flow::DataOut& packet : packets) {
    ibv_send_wr& request = requests[count];
    const bool is_eager = flow::slot_of(packet.immediate) == flow::EAGER_SLOT;
    if (is_eager) {  // the flow uses its ring again before the device may have read it
      const size_t buffer = take_buffer();
      std::memcpy((*send_buffers_)[buffer].data(), packet.payload, packet.size_bytes);
      entries[count] = send_buffers_->entry(buffer, packet.size_bytes);
      held[count] = {Held::Kind::buffer, buffer};
    } else if (packet.size_bytes != 0) {
      uint32_t key = 0;
      if (!exposure_->begin_reading(packet.payload, packet.size_bytes, held[count].id, key)) {
        ++counters_.send_dropped;  // it could not be registered: failure() says why
        continue;
      }
      entries[count] = {reinterpret_cast<uintptr_t>(packet.payload), packet.size_bytes, key};
      held[count].kind = Held::Kind::loan;
    }
    request.wr_id = name_of(path);
    request.sg_list = &entries[count];
    request.num_sge = packet.size_bytes != 0 ? 1 : 0;
    request.imm_data = htonl(packet.immediate);
    // A device takes eager packets into memory of its choice, not into a ring that a late copy could reach.
    request.opcode = is_eager && path.peer->is_device ? IBV_WR_SEND_WITH_IMM : IBV_WR_RDMA_WRITE_WITH_IMM;
    request.wr.rdma = {packet.remote_address, packet.rkey};
    if (count != 0) requests[count - 1].next = &request;
    ++count;
  }
  if (count == 0) return;
  ++counters_.send_calls;
  path.queue.post(&requests[0], std::span(held).first(count));
  if (!path.queue.is_ready()) on_path_error(path, last_now_us_);
}

void VerbsPort::check_on_peers(uint64_t now_us) {
  for (Peer* peer : connected_) peer->lane->flow().ask_if_silent(now_us, SILENCE_US);
}

// A device says nothing of a peer that is gone; one that lives and has not heard of the end does so now.
std::vector<uint32_t> VerbsPort::find_gone(uint64_t) {
  for (Peer* peer : connected_) {
    if (!peer->lane->flow().ended() || !has_room(*peer)) continue;
    // Over every rail, as some may be dead.
    for (Path* path : std::span(peer->paths).first(peer->rail_count)) {
      const size_t buffer = take_buffer();
      flow::ControlWriter writer((*send_buffers_)[buffer]);
      writer.header.flags = flow::CONTROL_ABORT;
      writer.add_reason(utf8_prefix(farewell_, flow::REASON_MAX_BYTES));
      send_control(*path, buffer, writer.finish());
    }
  }
  poll_completions(last_now_us_);
  return {};
}

uint64_t VerbsPort::next_timeout_us() const {
  uint64_t earliest_us = revive_at_us_;
  for (const Peer* peer : connected_) {
    // Without room there is nothing to do before completions come.
    if (has_room(*peer)) earliest_us = std::min(earliest_us, peer->lane->flow().next_timeout_us());
  }
  return earliest_us;
}

void VerbsPort::append_poll_fds(std::vector<pollfd>& out) const {
  out.push_back({channel_->fd, POLLIN, 0});
  out.push_back({device_->context()->async_fd, POLLIN, 0});
}

bool VerbsPort::idle() const {
  return std::all_of(connected_.begin(), connected_.end(), [](const Peer* peer) { return peer->lane->idle(); });
}

void VerbsPort::abort(std::string_view reason) {
  farewell_ = reason;
  for (Peer* peer : connected_) peer->lane->abort(reason);
  send_farewells(last_now_us_);
  const auto give_up = std::chrono::steady_clock::now() + END_MAX;
  while (!exposure_->close_all() && failure().empty() && std::chrono::steady_clock::now() < give_up)
    poll_completions(last_now_us_);
  if (exposure_->close_all()) return;
  // The device does not answer: nothing comes in or goes out of a queue pair that is reset.
  for (const auto& path : paths_) path->queue.stop(release_);
}

void VerbsPort::close() {
  for (Peer* peer : connected_) peer->lane->flow().close();
  send_farewells(last_now_us_);
}

void VerbsPort::send_farewells(uint64_t now_us) {
  // Nobody acknowledges these. The flow says how many there are; a few rounds bring them all out.
  constexpr int FAREWELL_ROUND_COUNT = 8;
  for (int round = 0; round < FAREWELL_ROUND_COUNT && send_round(now_us); ++round) poll_completions(now_us);
}

CounterList VerbsPort::counters() const {
  CounterList out = {
      {"send_calls", counters_.send_calls},
      {"send_blocked", counters_.send_blocked},
      {"send_dropped", counters_.send_dropped},
      {"receive_errors", counters_.receive_errors},
      {"remote_access_errors", counters_.remote_access_errors},
      {"unknown_qpn", counters_.unknown_qpn},
      {"path_errors", counters_.path_errors},
      {"path_revivals", counters_.path_revivals},
      {"port_events", counters_.port_events},
      {"memory_windows", exposure_->counters().windows},
      {"memory_binds", exposure_->counters().binds},
      {"message_registrations", exposure_->counters().message_registrations},
      {"keys_reused_early", exposure_->counters().keys_reused_early},
      {"registrations", registrations_->registrations()},
      {"registration_hits", registrations_->hits()},
      {"registered_bytes", registrations_->registered_bytes()},
  };
  flow::FlowCounters sum{};
  for (const Peer* peer : connected_) add_to_totals(sum, peer->lane->flow().counters());
  append_totals(out, sum);
  out.insert(out.end(), {{"bad_key", sum.bad_key_packets},
                         {"bad_range", sum.bad_range_packets},
                         {"bad_slot", sum.bad_slot_packets + counters_.bad_slot}});
  return out;
}

std::string VerbsPort::describe() const {
  std::string out = "verbs";
  for (const VerbsAddress& rail : rails_) out.append(" ").append(sennit::describe(rail));
  out.append(config_.service == VerbsService::rc ? ", RC, " : ", UC, ");
  out.append(exposure_->uses_windows() ? "a memory window a message, " : "a registration a message, ");
  out.append(config_.describe()).append(", ");
  return out.append(std::to_string(connected_.size())).append(" peers");
}

}  // namespace sennit
