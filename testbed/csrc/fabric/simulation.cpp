// SPDX-License-Identifier: Apache-2.0
#include "fabric/simulation.hpp"

#include <stdexcept>

#include "fabric/exchange.hpp"
#include "fabric/hash.hpp"
#include "fabric/ideal.hpp"

namespace sennit::fabric {
namespace {

enum Change : uint32_t { FAIL, CONVERGE };

LinkUse::Tier tier_of(const Topology& topology, uint32_t link) {
  const uint32_t cable = link / 2;
  const bool is_up = link == Topology::up_link(cable);
  if (cable < topology.first_fabric_cable()) return is_up ? LinkUse::Tier::host_up : LinkUse::Tier::host_down;
  if (cable < topology.first_core_cable()) return is_up ? LinkUse::Tier::leaf_up : LinkUse::Tier::leaf_down;
  return is_up ? LinkUse::Tier::spine_up : LinkUse::Tier::spine_down;
}

}  // namespace

struct Simulation::State {
  explicit State(const SimulationConfig& config)
      : config(config),
        topology(config.topology),
        failed(topology.choose_cables(config.failure.fraction, mix(config.seed, 1))),
        network(topology, config.link, mix(config.seed, 2), events),
        exchange(config.transport, mix(config.seed, 4), config.sample_us, network, events) {}

  const SimulationConfig config;
  const Topology topology;
  const std::vector<uint32_t> failed;
  EventQueue events;
  Network network;
  Exchange exchange;
  uint64_t event_count = 0, done_at_ps = 0;
  bool has_started = false;
};

Simulation::Simulation(const SimulationConfig& config) : state_(std::make_unique<State>(config)) {
  State& state = *state_;
  if (!state.failed.empty()) {
    // Checked before anything is sent, because otherwise some messages would never arrive.
    Routing after(state.topology, 0);
    std::vector<bool> is_up(state.topology.links().size(), true);
    for (const uint32_t cable : state.failed)
      is_up[Topology::up_link(cable)] = is_up[Topology::down_link(cable)] = false;
    after.compute(is_up);
    if (!after.is_connected())
      throw std::invalid_argument("the " + std::to_string(state.failed.size()) +
                                  " failed cables leave leaves without a path; use fewer cables or another seed");
    const uint64_t fail_ps = config.failure.at_us * PS_PER_US;
    state.events.push({fail_ps, Event::Kind::change, FAIL});
    state.events.push({fail_ps + config.failure.convergence_us * PS_PER_US, Event::Kind::change, CONVERGE});
  }
}

Simulation::~Simulation() = default;

uint64_t Simulation::now_us() const { return state_->events.now_ps() / PS_PER_US; }

void Simulation::add_rank(std::span<const std::byte> plan, std::span<const uint64_t> counts) {
  state_->exchange.add_rank(Plan::decode(plan.data(), plan.size()), counts);
}

bool Simulation::advance(uint64_t events_max) {
  State& state = *state_;
  if (!state.has_started) {
    state.has_started = true;
    // Links that fail at time 0 fail before the first packet.
    const FailureConfig& failure = state.config.failure;
    if (!state.failed.empty() && failure.at_us == 0) advance(failure.convergence_us == 0 ? 2 : 1);
    state.exchange.start();
  }
  for (uint64_t count = 0; count < events_max; ++count) {
    if (state.done_at_ps != 0 || !state.exchange.failure().empty() || state.events.empty()) return false;
    const Event event = state.events.pop();
    if (event.at_ps > state.config.deadline_us * PS_PER_US) return false;
    ++state.event_count;
    switch (event.kind) {
      case Event::Kind::arrival:
        if (state.network.arrive(event.index)) state.exchange.deliver(event.index);
        break;
      case Event::Kind::nic:
        state.exchange.on_nic(event.index);
        break;
      case Event::Kind::timer:
        state.exchange.on_timer(event.index);
        break;
      case Event::Kind::change:
        if (event.index == FAIL)
          state.network.fail_cables(state.failed);
        else
          state.network.converge();
        break;
    }
    state.exchange.settle();
    if (state.exchange.is_done()) state.done_at_ps = state.events.now_ps();
  }
  return true;
}

SimulationResult Simulation::result() const {
  const State& state = *state_;
  const uint64_t end_ps = state.done_at_ps != 0 ? state.done_at_ps : state.events.now_ps();
  const NetworkCounters& network = state.network.counters();
  const ExchangeCounters& exchange = state.exchange.counters();
  SimulationResult result{
      .is_complete = state.done_at_ps != 0,
      .failure = state.exchange.failure(),
      .completion_us = static_cast<double>(end_ps) / PS_PER_US,
      .ideal_us = ideal_us(state.config, state.topology, state.failed, state.exchange.ranks()),
      .trace_hash = state.exchange.trace_hash(),
      .events = state.event_count,
      .connections = exchange.connections,
      .messages = 0,
      .message_bytes = 0,
      .sent_packets = network.sent_packets,
      .delivered_packets = network.delivered_packets,
      .queue_dropped_packets = network.queue_dropped_packets,
      .black_holed_packets = network.black_holed_packets,
      .marked_packets = network.marked_packets,
      .hops = network.hops,
      .in_flight_packets = state.network.packets_in_flight(),
      .stale_packets = exchange.stale_packets,
      .flow = state.exchange.flow_counters(),
      .message_us = state.exchange.message_us(),
      .arrived_bytes = state.exchange.arrived_bytes(),
      .links = {},
  };
  for (const Traffic& pair : traffic()) {
    result.messages += pair.messages;
    result.message_bytes += pair.bytes;
  }
  std::vector<bool> has_failed(state.topology.links().size());
  for (const uint32_t cable : state.failed)
    has_failed[Topology::up_link(cable)] = has_failed[Topology::down_link(cable)] = true;
  for (uint32_t link = 0; link < state.topology.links().size(); ++link) {
    const LinkCounters& counters = state.network.link_counters()[link];
    const auto busy_ps =
        static_cast<double>(state.network.transmit_ps(1'000)) / 1'000 * static_cast<double>(counters.carried_bytes);
    result.links.push_back({tier_of(state.topology, link), has_failed[link],
                            end_ps == 0 ? 0 : busy_ps / static_cast<double>(end_ps), counters.peak_queue_bytes,
                            counters.dropped_packets});
  }
  return result;
}

std::vector<Traffic> Simulation::traffic() const {
  std::vector<Traffic> all;
  for (uint32_t rank = 0; rank < state_->exchange.ranks().size(); ++rank)
    for (const auto& [peer, lane] : state_->exchange.ranks()[rank].lanes())
      if (lane->received_messages() != 0)
        all.push_back({peer, rank, lane->received_messages(), lane->received_bytes()});
  return all;
}

}  // namespace sennit::fabric
