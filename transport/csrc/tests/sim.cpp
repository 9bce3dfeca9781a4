// SPDX-License-Identifier: Apache-2.0
#include "sim.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "wire/packet.hpp"

namespace sennit {
namespace {

constexpr size_t BATCH_PACKETS = 15;        // full packets in one GSO send of 64 KiB
constexpr size_t SOCKET_READ_PACKETS = 16;  // batches of one socket before the next socket's turn
constexpr uint32_t PATHS_PER_ENDPOINT = 256;
constexpr uint64_t NEVER = UINT64_MAX;

wire::Endpoint address_of(uint32_t endpoint) {
  wire::Endpoint address;
  address.is_ipv6 = true;
  std::memcpy(address.address.data() + 12, &endpoint, sizeof endpoint);
  address.port = wire::ROCE_UDP_PORT;
  return address;
}

uint32_t qpn_of(uint32_t endpoint, uint32_t path) { return endpoint * PATHS_PER_ENDPOINT + path; }

}  // namespace

uint32_t SimNetwork::add_link(const SimLinkConfig& config) {
  links_.push_back(Link{config});
  return static_cast<uint32_t>(links_.size() - 1);
}

void SimNetwork::connect(flow::Flow& first, flow::Flow& second, std::span<const uint32_t> there,
                         std::span<const uint32_t> back, Progress progress_first, Progress progress_second) {
  const auto a = static_cast<uint32_t>(endpoints_.size());
  const uint32_t b = a + 1;
  const auto add = [&](flow::Flow& flow, uint32_t self, uint32_t peer, std::span<const uint32_t> links,
                       Progress progress) {
    const wire::NetworkCrc crc(address_of(self), address_of(peer), wire::PACKET_MAX_BYTES);
    endpoints_.push_back(
        Endpoint{&flow, std::move(progress), {links.begin(), links.end()}, peer, crc, 0, NEVER, {}, false, {}, {}});
  };
  add(first, a, b, there, std::move(progress_first));
  add(second, b, a, back, std::move(progress_second));
}

void SimNetwork::set_pauses(uint32_t number, uint32_t socket_count, std::vector<SimPause> pauses) {
  endpoints_[number].pauses = std::move(pauses);
  endpoints_[number].sockets.resize(socket_count);
}

void SimNetwork::trace(uint64_t value) { trace_hash_ = (trace_hash_ ^ value) * 0x100'0000'01B3; }

uint32_t SimNetwork::new_packet() {
  if (free_packets_.empty()) {
    packets_.emplace_back();
    labels_.emplace_back();
    return static_cast<uint32_t>(packets_.size() - 1);
  }
  const uint32_t packet = free_packets_.back();
  free_packets_.pop_back();
  labels_[packet] = {};
  return packet;
}

void SimNetwork::schedule(uint64_t at_ns, uint32_t endpoint, uint32_t packet) {
  happenings_.push(Happening{at_ns, order_++, endpoint, packet});
}

void SimNetwork::finish_packet(const Endpoint& endpoint, std::vector<std::byte>& packet, size_t header_bytes) {
  const uint8_t pad_bytes = wire::pad_of(packet.size() - header_bytes);
  const size_t packet_bytes = packet.size() + pad_bytes + wire::ICRC_BYTES;
  const std::span<const std::byte> header(packet.data(), header_bytes);
  uint32_t crc = wire::extend_with_header(endpoint.crc.of(packet_bytes, 0), header);
  crc = wire::extend(crc, std::span<const std::byte>(packet).subspan(header_bytes));
  std::array<std::byte, 7> trailer{};
  const size_t trailer_bytes = wire::write_trailer(trailer, crc, pad_bytes);
  packet.insert(packet.end(), trailer.begin(), trailer.begin() + static_cast<std::ptrdiff_t>(trailer_bytes));
}

void SimNetwork::send_data(uint32_t number, uint32_t path, const flow::DataOut& data) {
  Endpoint& endpoint = endpoints_[number];
  const uint32_t index = new_packet();
  std::vector<std::byte>& packet = packets_[index];
  packet.resize(wire::DATA_HEADER_BYTES + data.size_bytes);
  wire::write_data_header(std::span(packet).first<wire::DATA_HEADER_BYTES>(), qpn_of(endpoint.peer, path),
                          endpoint.next_psn++ & wire::PSN_MASK, data.remote_address, data.rkey, data.immediate,
                          data.size_bytes);
  if (data.size_bytes != 0) std::memcpy(packet.data() + wire::DATA_HEADER_BYTES, data.payload, data.size_bytes);
  finish_packet(endpoint, packet, wire::DATA_HEADER_BYTES);
  trace(data.immediate);
  if (endpoint.is_paused) return endpoint.handed.emplace_back(path, index), void();
  transmit(number, path, index);
}

void SimNetwork::send_control(uint32_t number, uint32_t path, std::span<const std::byte> payload) {
  Endpoint& endpoint = endpoints_[number];
  const uint32_t index = new_packet();
  std::vector<std::byte>& packet = packets_[index];
  packet.resize(wire::CONTROL_HEADER_BYTES);
  wire::write_control_header(std::span(packet).first<wire::CONTROL_HEADER_BYTES>(), qpn_of(endpoint.peer, path),
                             endpoint.next_psn++ & wire::PSN_MASK, static_cast<uint32_t>(payload.size()));
  packet.insert(packet.end(), payload.begin(), payload.end());
  finish_packet(endpoint, packet, wire::CONTROL_HEADER_BYTES);
  transmit(number, path, index);
}

uint64_t SimNetwork::queued_bytes(uint32_t number) const {
  const Link& link = links_[number];
  const uint64_t now_ns = now_us_ * 1'000;
  return link.busy_until_ns > now_ns ? (link.busy_until_ns - now_ns) * link.config.rate_bytes_per_s / 1'000'000'000 : 0;
}

std::optional<uint64_t> SimNetwork::enqueue_ns(Link& link, size_t size_bytes, bool& is_marked) {
  const SimLinkConfig& config = link.config;
  const uint64_t now_ns = now_us_ * 1'000;
  is_marked = false;
  if (config.rate_bytes_per_s == 0) return now_ns;
  const uint64_t start_ns = std::max(link.busy_until_ns, now_ns);
  const uint64_t queued_bytes = (start_ns - now_ns) * config.rate_bytes_per_s / 1'000'000'000;
  if (config.queue_limit_bytes != 0 && queued_bytes + size_bytes > config.queue_limit_bytes) return std::nullopt;
  is_marked = config.ecn_threshold_bytes != 0 && queued_bytes > config.ecn_threshold_bytes;
  return link.busy_until_ns = start_ns + size_bytes * 1'000'000'000 / config.rate_bytes_per_s;
}

std::optional<uint64_t> SimNetwork::carry(uint32_t number, size_t size_bytes) {
  Link& link = links_[number];
  bool is_marked = false;
  if (link.config.ecn_threshold_bytes != 0 && queued_bytes(number) > link.config.ecn_threshold_bytes)
    return std::nullopt;
  const std::optional<uint64_t> leaves_ns = enqueue_ns(link, size_bytes, is_marked);
  if (!leaves_ns) return std::nullopt;
  return *leaves_ns / 1'000 + link.config.delay_us;
}

void SimNetwork::call_at(uint64_t at_us, std::function<void()> call) {
  uint32_t number = static_cast<uint32_t>(calls_.size());
  if (free_calls_.empty()) {
    calls_.emplace_back();
  } else {
    number = free_calls_.back();
    free_calls_.pop_back();
  }
  calls_[number] = std::move(call);
  schedule(std::max(at_us, now_us_) * 1'000, number, CALL);
}

void SimNetwork::transmit(uint32_t number, uint32_t path, uint32_t index) {
  const Endpoint& endpoint = endpoints_[number];
  Link& link = links_[endpoint.links[path % endpoint.links.size()]];
  const SimLinkConfig& config = link.config;
  std::vector<std::byte>& packet = packets_[index];
  labels_[index].path = path;
  ++counters_.sent;
  trace(now_us_);
  trace(uint64_t{number} << 48 | uint64_t{path} << 32 | packet.size());

  const auto drop = [&](uint64_t& counter) {
    ++counter;
    trace(0);
    free_packets_.push_back(index);
  };
  bool is_marked = false;
  const std::optional<uint64_t> queued_ns = enqueue_ns(link, packet.size(), is_marked);
  if (!queued_ns) return drop(counters_.queue_drops);
  const uint64_t leaves_ns = *queued_ns;
  counters_.marked += is_marked;
  labels_[index].is_marked = is_marked;
  const bool black_hole = std::ranges::any_of(config.black_holes, [&](const SimWindow& window) {
    return now_us_ >= window.from_us && now_us_ < window.until_us;
  });
  if (black_hole || random_.chance(config.loss_fraction)) return drop(counters_.lost);

  const auto arrival_ns = [&] { return leaves_ns + (config.delay_us + random_.below(config.jitter_us + 1)) * 1'000; };
  if (random_.chance(config.duplicate_fraction)) {
    ++counters_.duplicated;
    const uint32_t copy = new_packet();
    packets_[copy] = packets_[index];
    labels_[copy] = labels_[index];
    schedule(arrival_ns(), endpoint.peer, copy);
  }
  if (random_.chance(config.corrupt_fraction)) {
    ++counters_.corrupted;
    std::vector<std::byte>& victim = packets_[index];
    victim[random_.below(victim.size())] ^= std::byte{1} << random_.below(8);
  }
  const uint64_t at_ns = arrival_ns();
  trace(at_ns);
  schedule(at_ns, endpoint.peer, index);
}

void SimNetwork::scribble(flow::Flow& flow) {
  std::array<flow::Placement, 16> places;
  const size_t count = flow.predict(places);
  for (size_t i = 0; i < count; ++i)
    if (places[i].size_bytes != 0)
      std::memset(places[i].destination, static_cast<int>(random_.below(256)), places[i].size_bytes);
}

void SimNetwork::receive(uint32_t number, uint32_t index) {
  Endpoint& endpoint = endpoints_[number];
  flow::Flow& flow = *endpoint.flow;
  const std::span<const std::byte> packet(packets_[index]);
  if (scribbling_ && random_.chance(0.25)) scribble(flow);

  wire::Packet header;
  const auto refuse = [&] { ++counters_.refused; };
  const size_t head_bytes = std::min(packet.size(), wire::DATA_HEADER_BYTES);
  if (wire::parse(packet.first(head_bytes), packet.size(), header) != wire::Refusal::none) return refuse();
  if (header.qpn / PATHS_PER_ENDPOINT != number) return refuse();
  const auto body = packet.subspan(header.header_bytes(), header.icrc_offset() - header.header_bytes());
  uint32_t crc = endpoints_[endpoint.peer].crc.of(packet.size(), 0);
  crc = wire::extend(wire::extend_with_header(crc, packet.first(header.header_bytes())), body);
  if (std::memcmp(packet.data() + header.icrc_offset(), &crc, wire::ICRC_BYTES) != 0) return refuse();

  ++counters_.delivered;
  const uint32_t path = header.qpn % PATHS_PER_ENDPOINT;
  const auto payload = packet.subspan(header.payload_offset, header.payload_bytes);
  if (header.opcode == wire::Opcode::uc_send_only) return flow.on_control(now_us_, path, payload);
  flow::Placement place;
  const flow::Verdict verdict =
      flow.locate(header.immediate, header.remote_address, header.rkey, header.payload_bytes, place);
  if (verdict != flow::Verdict::place && verdict != flow::Verdict::duplicate) return;
  if (place.destination != nullptr && !payload.empty()) std::memcpy(place.destination, payload.data(), payload.size());
  flow.on_data(now_us_, path, header.immediate, header.payload_bytes, labels_[index].is_marked);
}

void SimNetwork::service(uint32_t number) {
  flow::Flow& flow = *endpoints_[number].flow;
  const bool has_read_all = std::ranges::all_of(endpoints_[number].sockets, &std::deque<uint32_t>::empty);
  if (has_read_all && flow.next_timeout_us() <= now_us_) flow.on_timeout(now_us_);
  endpoints_[number].progress(now_us_);

  std::array<flow::DataOut, BATCH_PACKETS> batch;
  std::array<std::byte, flow::CONTROL_MAX_BYTES> control;
  uint32_t path = 0;
  while (const size_t count = flow.poll_data(now_us_, batch, path)) {
    const std::vector<SimPause>& pauses = endpoints_[number].pauses;
    if (!pauses.empty() && pauses.front().where == SimPause::Where::sending && pauses.front().from_us <= now_us_)
      begin_pause(number);
    for (size_t i = 0; i < count; ++i) send_data(number, path, batch[i]);
    if (endpoints_[number].is_paused) return;
  }
  while (const size_t size_bytes = flow.poll_control(now_us_, control, path))
    send_control(number, path, std::span(control).first(size_bytes));

  Endpoint& endpoint = endpoints_[number];
  const uint64_t timeout_us = flow.next_timeout_us();
  if (timeout_us == NEVER) {
    endpoint.wake_us = NEVER;
    return;
  }
  const uint64_t wake_us = std::max(timeout_us, now_us_ + 1);
  if (wake_us == endpoint.wake_us) return;
  endpoint.wake_us = wake_us;
  schedule(wake_us * 1'000, number, NO_PACKET);
}

void SimNetwork::begin_pause(uint32_t number) {
  Endpoint& endpoint = endpoints_[number];
  const SimPause& pause = endpoint.pauses.front();
  endpoint.is_paused = true;
  endpoint.wake_us = NEVER;
  const uint64_t until_us =
      pause.where == SimPause::Where::sending ? now_us_ + (pause.until_us - pause.from_us) : pause.until_us;
  schedule(until_us * 1'000, number, RESUME);
}

void SimNetwork::resume(uint32_t number) {
  Endpoint& endpoint = endpoints_[number];
  const SimPause pause = endpoint.pauses.front();
  endpoint.pauses.erase(endpoint.pauses.begin());
  endpoint.is_paused = false;
  for (const auto& [path, packet] : std::exchange(endpoint.handed, {})) transmit(number, path, packet);
  // The rest of the round that it was in, then whole rounds until all sockets are empty.
  size_t first_socket = pause.where == SimPause::Where::receiving ? pause.sockets_read : 0;
  for (bool is_empty = false; !is_empty && !endpoint.is_paused; first_socket = 0) {
    is_empty = first_socket == 0;
    for (size_t socket = first_socket; socket < endpoint.sockets.size(); ++socket) {
      std::deque<uint32_t>& waiting = endpoint.sockets[socket];
      for (size_t read = 0; read < SOCKET_READ_PACKETS && !waiting.empty(); ++read) {
        receive(number, waiting.front());
        free_packets_.push_back(waiting.front());
        waiting.pop_front();
        is_empty = false;
      }
    }
    service(number);
  }
}

void SimNetwork::kick() {
  for (uint32_t number = 0; number < endpoints_.size(); ++number) service(number);
}

void SimNetwork::happen(const Happening& happening) {
  if (happening.packet == CALL) {
    const std::function<void()> call = std::exchange(calls_[happening.endpoint], {});
    free_calls_.push_back(happening.endpoint);
    return call();
  }
  Endpoint& endpoint = endpoints_[happening.endpoint];
  if (happening.packet == RESUME) return resume(happening.endpoint);
  const bool is_timer = happening.packet == NO_PACKET;
  if (!endpoint.is_paused && !endpoint.pauses.empty() && endpoint.pauses.front().from_us <= now_us_ &&
      endpoint.pauses.front().where != SimPause::Where::sending)
    begin_pause(happening.endpoint);
  if (endpoint.is_paused) {
    if (!is_timer)
      endpoint.sockets[labels_[happening.packet].path % endpoint.sockets.size()].push_back(happening.packet);
    return;
  }
  if (is_timer) {
    endpoint.wake_us = NEVER;
  } else {
    receive(happening.endpoint, happening.packet);
    free_packets_.push_back(happening.packet);
  }
  service(happening.endpoint);
}

bool SimNetwork::step() {
  while (!happenings_.empty()) {
    const Happening next = happenings_.top();
    happenings_.pop();
    const bool is_timer = next.packet == NO_PACKET;
    // The timer was set anew since.
    if (is_timer && endpoints_[next.endpoint].wake_us * 1'000 != next.at_ns) continue;
    now_us_ = std::max(now_us_, next.at_ns / 1'000);
    happen(next);
    return true;
  }
  return false;
}

void SimNetwork::advance(uint64_t until_us) {
  kick();
  while (!happenings_.empty() && happenings_.top().at_ns <= until_us * 1'000) step();
  now_us_ = std::max(now_us_, until_us);
}

bool SimNetwork::run(uint64_t deadline_us, const std::function<bool()>& done) {
  kick();
  while (!done())
    if (now_us_ > deadline_us || !step()) return false;
  return true;
}

}  // namespace sennit
