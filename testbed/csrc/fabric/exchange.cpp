// SPDX-License-Identifier: Apache-2.0
#include "fabric/exchange.hpp"

#include <algorithm>
#include <stdexcept>

#include "fabric/hash.hpp"

namespace sennit::fabric {
namespace {

constexpr uint32_t BATCH_PACKETS_MAX = 64;
constexpr uint32_t TICKS_PER_US_MAX = 1'000;
// The timers of a flow that always has something to send are served this often.
constexpr uint64_t TIMER_SLICE_US = 10;
// The dynamic ports (RFC 6335), which docs/reference/wire.md assigns to entropies.
constexpr uint32_t FIRST_PORT = 0xC000, PORT_COUNT = 0x4000;

TransportConfig checked(const TransportConfig& config) {
  if (config.batch_packets < 1 || config.batch_packets > BATCH_PACKETS_MAX)
    throw std::invalid_argument("batch_packets is " + std::to_string(config.batch_packets) + "; allowed: 1..64");
  if (config.ticks_per_us < 1 || config.ticks_per_us > TICKS_PER_US_MAX)
    throw std::invalid_argument("ticks_per_us is " + std::to_string(config.ticks_per_us) + "; allowed: 1..1000");
  TransportConfig in_ticks = config;
  in_ticks.flow.ack_delay_us *= config.ticks_per_us;
  in_ticks.flow.target_queue_us *= config.ticks_per_us;
  in_ticks.flow.peer_timeout_us *= config.ticks_per_us;
  return in_ticks;
}

void add(flow::FlowCounters& sum, const flow::FlowCounters& part) {
  sum.data_packets_sent += part.data_packets_sent;
  sum.data_packets_received += part.data_packets_received;
  sum.data_bytes_sent += part.data_bytes_sent;
  sum.data_bytes_received += part.data_bytes_received;
  sum.control_packets_sent += part.control_packets_sent;
  sum.control_packets_received += part.control_packets_received;
  sum.retransmitted_packets += part.retransmitted_packets;
  sum.duplicate_packets += part.duplicate_packets;
  sum.out_of_sequence += part.out_of_sequence;
  sum.local_ack_timeout_err += part.local_ack_timeout_err;
  sum.tail_probe_packets += part.tail_probe_packets;
}

}  // namespace

Exchange::Exchange(const TransportConfig& config, uint64_t seed, uint64_t sample_us, Network& network,
                   EventQueue& events, Workload& workload)
    : config_(checked(config)),
      seed_(seed),
      sample_ps_(std::max<uint64_t>(1, sample_us) * PS_PER_US),
      network_(network),
      events_(events),
      workload_(workload),
      tick_ps_(PS_PER_US / config_.ticks_per_us),
      timer_slice_ticks_(TIMER_SLICE_US * config_.ticks_per_us),
      // The NIC fetches the next batch while one packet is on the link.
      nic_ahead_ps_(network.transmit_ps(config.flow.payload_max_bytes + DATA_OVERHEAD_BYTES)),
      eager_memory_(size_t{config.flow.eager_slot_count} * config.flow.payload_max_bytes),
      memory_(new std::byte[workload.message_max_bytes()]),
      hosts_(network.host_count()) {}

uint32_t Exchange::connect(const Message& message) {
  const bool by_message = config_.spread == Spread::per_message;
  const uint64_t entropy = by_message ? mix(seed_, message.number) % config_.flow.path_count : 0;
  const uint64_t key = entropy << 32 | uint64_t{message.from} << 16 | message.to;
  const auto [place, is_new] = by_key_.try_emplace(key, 0);
  if (!is_new) return place->second;
  uint32_t number;
  if (free_connections_.empty()) {
    number = static_cast<uint32_t>(connections_.size());
    connections_.emplace_back();
  } else {
    number = free_connections_.back();
    free_connections_.pop_back();
  }
  place->second = number;
  Connection& connection = connections_[number];
  connection.key = key;
  connection.posted_count = connection.ready_count = connection.received_count = connection.sent_count = 0;
  for (uint32_t side = 0; side < 2; ++side) {
    Endpoint& end = connection.ends[side];
    flow::FlowConfig config = config_.flow;
    config.seed = mix(mix(seed_, key), side);
    if (by_message) config.path_count = 1;
    end.flow = std::make_unique<flow::Flow>(config, eager_memory_, 0);
    end.flow->set_remote_eager(reinterpret_cast<uint64_t>(eager_memory_.data()), 0);
    end.host = side == 0 ? message.from : message.to;
    end.peer = side == 0 ? message.to : message.from;
    end.checked_ticks = now_ticks();
  }
  ++counters_.connections;
  return number;
}

void Exchange::end(uint32_t number) {
  Connection& connection = connections_[number];
  for (Endpoint& end : connection.ends) {
    add(ended_counters_, end.flow->counters());
    end.flow.reset();
    end.wake_ps = end.timer_ps = NEVER;
    end.is_waiting = end.is_due = false;
    end.refused_ticks = NEVER;
  }
  connection.posted.clear();
  connection.ready.clear();
  connection.adverts.clear();
  ++connection.generation;
  by_key_.erase(connection.key);
  free_connections_.push_back(number);
}

void Exchange::post(const Message& message) {
  const uint32_t number = connect(message);
  Connection& connection = connections_[number];
  ++connection.posted_count;
  const uint64_t id = connection.posted.push({message, events_.now_ps(), false});
  connection.ends[1].flow->advertise(id, {message.number, ~message.number, message.size_bytes}, memory_.get(),
                                     static_cast<uint32_t>(message.number), now_ticks());
  touch(2 * number + 1);
}

void Exchange::ready(const Message& message) {
  const uint32_t number = connect(message);
  Connection& connection = connections_[number];
  ++connection.ready_count;
  const auto advert = std::ranges::find(connection.adverts, message.number, &Advert::number);
  if (advert == connection.adverts.end()) {
    connection.ready.push_back(message);
    return;
  }
  transfer(number, message, advert->id);
  connection.adverts.erase(advert);
}

void Exchange::on_advert(uint32_t number, const Advert& advert) {
  Connection& connection = connections_[number];
  const auto message = std::ranges::find(connection.ready, advert.number, &Message::number);
  if (message == connection.ready.end()) {
    connection.adverts.push_back(advert);
    return;
  }
  transfer(number, *message, advert.id);
  connection.ready.erase(message);
}

void Exchange::transfer(uint32_t number, const Message& message, uint64_t advert_id) {
  connections_[number].ends[0].flow->transfer(message.number, advert_id, memory_.get(), message.size_bytes);
  touch(2 * number);
}

void Exchange::touch(uint32_t number) {
  Endpoint& end = endpoint(number);
  if (end.is_touched) return;
  end.is_touched = true;
  touched_.push_back(number);
}

void Exchange::settle() {
  // service() may touch more endpoints.
  for (size_t next = 0; next < touched_.size(); ++next) {
    endpoint(touched_[next]).is_touched = false;
    service(touched_[next]);
  }
  touched_.clear();
}

void Exchange::on_event(uint32_t number, const flow::Event& event) {
  using Kind = flow::Event::Kind;
  Connection& connection = connections_[number / 2];
  switch (event.kind) {
    case Kind::advert:
      return on_advert(number / 2, {event.header.key, event.id});
    case Kind::sent:
      ++connection.sent_count;
      return;
    case Kind::received: {
      Posted& posted = connection.posted[event.id];
      posted.is_received = true;
      const Message message = posted.message;
      message_us_.push_back(static_cast<float>(events_.now_ps() - posted.at_ps) / PS_PER_US);
      while (!connection.posted.empty() && connection.posted.front().is_received) connection.posted.pop();
      ++connection.received_count;
      ++counters_.messages;
      counters_.message_bytes += message.size_bytes;
      return workload_.on_received(*this, message);
    }
    case Kind::peer_lost:
    case Kind::peer_aborted:
      failure_ = "host " + std::to_string(endpoint(number).host) + " lost host " +
                 std::to_string(endpoint(number).peer) + ": " + event.reason;
      return;
    case Kind::eager:
      return;  // no workload sends eager messages
  }
}

void Exchange::service(uint32_t number) {
  Endpoint& end = endpoint(number);
  if (end.flow == nullptr) return;
  flow::Flow& flow = *end.flow;
  const uint64_t now_ticks = this->now_ticks();
  if (end.is_due || (end.is_waiting && now_ticks >= end.checked_ticks + timer_slice_ticks_)) {
    end.is_due = false;
    end.checked_ticks = now_ticks;
    flow.on_timeout(now_ticks);
  }
  for (flow::Event event; flow.poll_event(event);) on_event(number, event);

  Connection& connection = connections_[number / 2];
  if (!workload_.keeps_connections() && connection.received_count == connection.posted_count &&
      connection.sent_count == connection.ready_count && connection.posted_count == connection.ready_count) {
    return this->end(number / 2);
  }
  std::array<std::byte, flow::CONTROL_MAX_BYTES> control;
  uint32_t path = 0;
  while (const size_t size_bytes = flow.poll_control(now_ticks, control, path)) {
    const uint32_t index = new_packet(number, path);
    Packet& packet = network_.packet(index);
    packet.is_control = true;
    packet.payload_bytes = static_cast<uint32_t>(size_bytes);
    packet.wire_bytes = packet.payload_bytes + CONTROL_OVERHEAD_BYTES;
    network_.payload(index).assign(control.begin(), control.begin() + static_cast<std::ptrdiff_t>(size_bytes));
    network_.send(index);
  }
  arm(number);
}

// Makes the flow wait for its NIC's attention, or for a time.
void Exchange::arm(uint32_t number) {
  Endpoint& end = endpoint(number);
  if (end.is_waiting) return;
  const uint64_t due_ticks = end.flow->next_timeout_us();
  // A flow that is due now has data to send, unless the NIC just found none: then it is served later.
  if (due_ticks <= now_ticks() && end.refused_ticks != now_ticks()) {
    end.is_waiting = true;
    hosts_[end.host].waiting.push_back({number, connections_[number / 2].generation});
    return pump(end.host);
  }
  end.wake_ps = due_ticks == NEVER ? NEVER : std::max(due_ticks, now_ticks() + 1) * tick_ps_;
  // An event that is already set and comes earlier will arm the timer again.
  if (end.wake_ps >= end.timer_ps) return;
  end.timer_ps = end.wake_ps;
  events_.push({end.timer_ps, Event::Kind::timer, number});
}

void Exchange::on_timer(uint32_t number) {
  Endpoint& end = endpoint(number);
  if (end.timer_ps != events_.now_ps()) return;  // its connection has ended, or an earlier event overtook it
  end.timer_ps = NEVER;
  if (end.wake_ps <= events_.now_ps()) {
    end.is_due = true;
    return touch(number);
  }
  if (end.wake_ps == NEVER) return;
  end.timer_ps = end.wake_ps;
  events_.push({end.timer_ps, Event::Kind::timer, number});
}

void Exchange::pump(uint32_t number) {
  Host& host = hosts_[number];
  std::array<flow::DataOut, BATCH_PACKETS_MAX> batch;
  while (!host.waiting.empty()) {
    const uint64_t backlog_ps = network_.host_backlog_ps(number);
    if (backlog_ps > nic_ahead_ps_) {
      if (host.is_timed) return;
      host.is_timed = true;
      return events_.push({events_.now_ps() + backlog_ps - nic_ahead_ps_, Event::Kind::nic, number});
    }
    const Waiting next = host.waiting.front();
    host.waiting.pop_front();
    if (connections_[next.endpoint / 2].generation != next.generation) continue;
    Endpoint& end = endpoint(next.endpoint);
    uint32_t path = 0;
    const size_t count = end.flow->poll_data(now_ticks(), std::span(batch).first(config_.batch_packets), path);
    for (size_t i = 0; i < count; ++i) {
      const uint32_t index = new_packet(next.endpoint, path);
      Packet& packet = network_.packet(index);
      packet.is_control = false;
      packet.remote_address = batch[i].remote_address;
      packet.rkey = batch[i].rkey;
      packet.immediate = batch[i].immediate;
      packet.payload_bytes = batch[i].size_bytes;
      packet.wire_bytes = packet.payload_bytes + DATA_OVERHEAD_BYTES;
      network_.send(index);
    }
    if (count != 0) {
      host.waiting.push_back(next);
      continue;
    }
    end.is_waiting = false;
    end.refused_ticks = now_ticks();
    touch(next.endpoint);
  }
}

void Exchange::on_nic(uint32_t host) {
  hosts_[host].is_timed = false;
  pump(host);
}

uint32_t Exchange::new_packet(uint32_t number, uint32_t path) {
  const Endpoint& end = endpoint(number);
  const Connection& connection = connections_[number / 2];
  const uint32_t index = network_.new_packet();
  Packet& packet = network_.packet(index);
  const uint64_t port = FIRST_PORT + mix(mix(seed_, connection.key), path) % PORT_COUNT;
  packet.tuple = mix(uint64_t{end.host} << 40 | uint64_t{end.peer} << 16 | port);
  packet.source = end.host;
  packet.destination = end.peer;
  packet.endpoint = number ^ 1;
  packet.generation = connection.generation;
  packet.path = static_cast<uint16_t>(path);
  return index;
}

void Exchange::deliver(uint32_t index) {
  const Packet packet = network_.packet(index);
  trace(events_.now_ps());
  trace(packet.tuple ^ packet.immediate);
  if (connections_[packet.endpoint / 2].generation != packet.generation) {
    ++counters_.stale_packets;
    return network_.free_packet(index);
  }
  flow::Flow& flow = *endpoint(packet.endpoint).flow;
  if (packet.is_control) {
    flow.on_control(now_ticks(), packet.path, network_.payload(index));
  } else {
    flow::Placement place;
    const flow::Verdict verdict =
        flow.locate(packet.immediate, packet.remote_address, packet.rkey, packet.payload_bytes, place);
    if (verdict == flow::Verdict::place) {
      const size_t sample = events_.now_ps() / sample_ps_;
      if (arrived_bytes_.size() <= sample) arrived_bytes_.resize(sample + 1);
      arrived_bytes_[sample] += packet.payload_bytes;
    }
    if (verdict == flow::Verdict::place || verdict == flow::Verdict::duplicate)
      flow.on_data(now_ticks(), packet.path, packet.immediate, packet.payload_bytes, packet.is_marked);
  }
  network_.free_packet(index);
  touch(packet.endpoint);
}

flow::FlowCounters Exchange::flow_counters() const {
  flow::FlowCounters sum = ended_counters_;
  for (const auto& [key, number] : by_key_)
    for (const Endpoint& end : connections_[number].ends) add(sum, end.flow->counters());
  return sum;
}

}  // namespace sennit::fabric
