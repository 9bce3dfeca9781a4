// SPDX-License-Identifier: Apache-2.0
#include "fabric/exchange.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "fabric/hash.hpp"
#include "flow/control.hpp"
#include "flow/immediate.hpp"

namespace sennit::fabric {
namespace {

constexpr uint32_t BATCH_PACKETS_MAX = 64, TURN_PACKETS_MAX = 64;
constexpr uint32_t TICKS_PER_US_MAX = 1'000;
// Beyond this many connections, an idle one ends. One takes about 25 KiB.
constexpr size_t CONNECTIONS_KEPT = 8'192;
constexpr uint32_t EAGER_KEY = 0;
// The timers of a flow that always has something to send are served this often.
constexpr uint64_t TIMER_SLICE_US = 10;
// The dynamic ports (RFC 6335), which docs/reference/wire.md assigns to entropies.
constexpr uint32_t FIRST_PORT = 0xC000, PORT_COUNT = 0x4000;

TransportConfig checked(const TransportConfig& config) {
  if (config.batch_packets < 1 || config.batch_packets > BATCH_PACKETS_MAX)
    throw std::invalid_argument("batch_packets is " + std::to_string(config.batch_packets) + "; allowed: 1..64");
  if (config.ticks_per_us < 1 || config.ticks_per_us > TICKS_PER_US_MAX)
    throw std::invalid_argument("ticks_per_us is " + std::to_string(config.ticks_per_us) + "; allowed: 1..1000");
  if (config.turn_packets < 1 || config.turn_packets > TURN_PACKETS_MAX)
    throw std::invalid_argument("turn_packets is " + std::to_string(config.turn_packets) + "; allowed: 1..64");
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
                   EventQueue& events)
    : config_(checked(config)),
      seed_(seed),
      sample_ps_(std::max<uint64_t>(1, sample_us) * PS_PER_US),
      network_(network),
      events_(events),
      tick_ps_(PS_PER_US / config_.ticks_per_us),
      timer_slice_ticks_(TIMER_SLICE_US * config_.ticks_per_us),
      // The NIC fetches the next batch while one packet is on the link.
      nic_ahead_ps_(network.transmit_ps(config.flow.payload_max_bytes + DATA_OVERHEAD_BYTES)),
      keys_(0, [this] { return static_cast<uint32_t>(mix(seed_, keys_given_++)); }),
      hosts_(network.host_count()) {
  clock_.join();
  for (Host& host : hosts_) host.loans = std::make_unique<LoanPool>(keys_, std::make_shared<LoanMemory>());
  if (config_.receive_budget_bytes == 0) return;
  const flow::ReceiveBudgetConfig defaults;
  for (Host& host : hosts_)
    host.budget = std::make_unique<flow::ReceiveBudget>(
        flow::ReceiveBudgetConfig{.max_bytes = config_.receive_budget_bytes,
                                  .start_bytes = std::min(defaults.start_bytes, config_.receive_budget_bytes),
                                  .min_bytes = std::min(defaults.min_bytes, config_.receive_budget_bytes),
                                  .target_queue_us = config_.flow.target_queue_us});
}

void Exchange::add_rank(std::unique_ptr<Plan> plan, std::span<const uint64_t> counts) {
  const size_t rank = ranks_.size(), world = hosts_.size();
  if (plan->rank != rank || plan->world != world)
    throw std::invalid_argument("the plan is for rank " + std::to_string(plan->rank) + " of " +
                                std::to_string(plan->world) + "; allowed: " + std::to_string(rank) + " of " +
                                std::to_string(world));
  ranks_.emplace_back(static_cast<Connections&>(*this), std::move(plan), counts);
}

void Exchange::start() {
  if (ranks_.size() != hosts_.size())
    throw std::invalid_argument(std::to_string(ranks_.size()) + " plans for " + std::to_string(hosts_.size()) +
                                " hosts; allowed: one for each");
  uint64_t most_bytes = 0;
  for (const Rank& rank : ranks_) most_bytes = std::max(most_bytes, rank.memory_bytes());
  memory_ = std::make_unique_for_overwrite<std::byte[]>(most_bytes);
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].post(memory_.get());
    touch_rank(rank);
  }
  settle();
}

void Exchange::connect(uint32_t rank, uint32_t peer) {
  const uint64_t key = uint64_t{std::min(rank, peer)} << 32 | std::max(rank, peer);
  uint32_t number;
  if (free_connections_.empty()) {
    number = static_cast<uint32_t>(connections_.size());
    connections_.emplace_back();
  } else {
    number = free_connections_.back();
    free_connections_.pop_back();
  }
  by_key_.emplace(key, number);
  Connection& connection = connections_[number];
  connection.key = key;
  const size_t eager_bytes = size_t{config_.flow.eager_slot_count} * config_.flow.payload_max_bytes;
  for (uint32_t side = 0; side < 2; ++side) {
    Endpoint& end = connection.ends[side];
    end.host = side == 0 ? rank : peer;
    end.peer = side == 0 ? peer : rank;
    end.above = ranks_[end.host].lane(end.peer);
    end.eager_memory = std::make_unique_for_overwrite<std::byte[]>(eager_bytes);
    flow::FlowConfig config = config_.flow;
    config.seed = mix(mix(seed_, key), end.host < end.peer ? 0 : 1);
    config.receive_budget = hosts_[end.host].budget.get();
    config.agenda = &clock_;
    end.lane = std::make_unique<FlowLane>(end.peer, config, std::span(end.eager_memory.get(), eager_bytes), EAGER_KEY,
                                          keys_, *hosts_[end.host].loans, *end.above);
    end.above->set_base(end.lane.get(), 2 * number + side);
    end.checked_ticks = now_ticks();
  }
  for (uint32_t side = 0; side < 2; ++side)
    connection.ends[side].lane->flow().set_remote_eager(
        reinterpret_cast<uint64_t>(connection.ends[side ^ 1].eager_memory.get()), EAGER_KEY);
  ++counters_.connections;
}

bool Exchange::Endpoint::is_idle() const { return above->is_idle() && lane->idle() && !lane->flow().has_event(); }

void Exchange::end(uint32_t number) {
  Connection& connection = connections_[number];
  for (Endpoint& end : connection.ends) {
    add(ended_counters_, end.lane->flow().counters());
    end.above->set_base(nullptr, 0);
    end.lane.reset();
    end.eager_memory.reset();
    end.wake_ps = end.timer_ps = NEVER;
    end.is_waiting = end.is_due = false;
    end.refused_ticks = NEVER;
  }
  ++connection.generation;
  by_key_.erase(connection.key);
  free_connections_.push_back(number);
}

void Exchange::touch(uint32_t number) {
  Endpoint& end = endpoint(number);
  if (end.is_touched) return;
  end.is_touched = true;
  touched_.push_back(number);
}

void Exchange::touch_rank(uint32_t rank) {
  if (std::exchange(hosts_[rank].is_touched, true)) return;
  touched_ranks_.push_back(rank);
}

void Exchange::settle() {
  clock_.set_now(now_ticks());
  // Ranks touch endpoints, and endpoints touch ranks.
  for (size_t next = 0, next_rank = 0; next < touched_.size() || next_rank < touched_ranks_.size();) {
    if (next_rank < touched_ranks_.size()) {
      const uint32_t rank = touched_ranks_[next_rank++];
      hosts_[rank].is_touched = false;
      if (ranks_[rank].run(now_ticks())) ++done_ranks_;
      if (failure_.empty()) failure_ = ranks_[rank].failure();
    } else {
      const uint32_t number = touched_[next++];
      endpoint(number).is_touched = false;
      service(number);
    }
  }
  touched_.clear();
  touched_ranks_.clear();
}

void Exchange::service(uint32_t number) {
  Endpoint& end = endpoint(number);
  if (end.lane == nullptr) return;
  flow::Flow& flow = end.lane->flow();
  const uint64_t now_ticks = this->now_ticks();
  if (end.is_due || (end.is_waiting && now_ticks >= end.checked_ticks + timer_slice_ticks_)) {
    end.is_due = false;
    end.checked_ticks = now_ticks;
    flow.on_timeout(now_ticks);
  }
  end.lane->pump(now_ticks);
  // Its small messages may have room now.
  if (!ranks_[end.host].mailbox().idle()) touch_rank(end.host);
  if (by_key_.size() > CONNECTIONS_KEPT && end.is_idle() && endpoint(number ^ 1).is_idle())
    return this->end(number / 2);
  std::array<std::byte, flow::CONTROL_MAX_BYTES> control;
  uint32_t path = 0;
  while (const size_t size_bytes = flow.poll_control(now_ticks, control, path)) {
    const uint32_t index = new_packet(number, path);
    Packet& packet = network_.packet(index);
    packet.is_control = true;
    // A probe asks about the data before it, so it must not overtake them.
    flow::ControlReader reader;
    packet.is_urgent = config_.control_first && reader.parse(std::span(control).first(size_bytes)) &&
                       (reader.header().flags & flow::CONTROL_PROBE) == 0;
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
  const uint64_t due_ticks = end.lane->flow().next_timeout_us();
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
    uint32_t sent = 0;
    for (size_t count = 1; count != 0 && sent < config_.turn_packets; sent += static_cast<uint32_t>(count))
      count = send_batch(next.endpoint);
    if (sent >= config_.turn_packets) {
      host.waiting.push_back(next);
      continue;
    }
    Endpoint& end = endpoint(next.endpoint);
    end.is_waiting = false;
    end.refused_ticks = now_ticks();
    touch(next.endpoint);
  }
}

// Returns the number of packets, all on one path. 0: the flow has none to send now.
size_t Exchange::send_batch(uint32_t number) {
  std::array<flow::DataOut, BATCH_PACKETS_MAX> batch;
  uint32_t path = 0;
  const size_t count =
      endpoint(number).lane->flow().poll_data(now_ticks(), std::span(batch).first(config_.batch_packets), path);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t index = new_packet(number, path);
    Packet& packet = network_.packet(index);
    packet.is_control = packet.is_urgent = false;
    packet.remote_address = batch[i].remote_address;
    packet.rkey = batch[i].rkey;
    packet.immediate = batch[i].immediate;
    packet.payload_bytes = batch[i].size_bytes;
    packet.wire_bytes = packet.payload_bytes + DATA_OVERHEAD_BYTES;
    // The header of a small message is in the payload.
    if (flow::slot_of(packet.immediate) == flow::EAGER_SLOT)
      network_.payload(index).assign(batch[i].payload, batch[i].payload + flow::EAGER_HEADER_BYTES);
    network_.send(index);
  }
  return count;
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
  flow::Flow& flow = endpoint(packet.endpoint).lane->flow();
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
      if (flow::slot_of(packet.immediate) == flow::EAGER_SLOT)
        std::ranges::copy(network_.payload(index), place.destination);
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
    for (const Endpoint& end : connections_[number].ends) add(sum, end.lane->flow().counters());
  return sum;
}

}  // namespace sennit::fabric
