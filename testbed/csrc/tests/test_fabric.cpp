// SPDX-License-Identifier: Apache-2.0
// The parts of the simulated fabric.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <queue>
#include <stdexcept>
#include <tuple>

#include "fabric/event_queue.hpp"
#include "fabric/hash.hpp"
#include "fabric/network.hpp"

using namespace sennit;
using namespace sennit::fabric;

namespace {

constexpr TopologyConfig TWO_TIERS{.hosts = 64, .hosts_per_leaf = 8, .spines = 8};
constexpr TopologyConfig THREE_TIERS{
    .hosts = 64, .hosts_per_leaf = 4, .spines = 4, .leaves_per_pod = 4, .cores_per_spine = 4};

// Runs the network alone until no packet is in flight. Returns arrivals in order.
std::vector<std::pair<uint64_t, uint32_t>> drain(Network& network, EventQueue& events) {
  std::vector<std::pair<uint64_t, uint32_t>> arrived;
  while (!events.empty()) {
    const Event event = events.pop();
    if (!network.arrive(event.index)) continue;
    arrived.emplace_back(events.now_ps(), event.index);
    network.free_packet(event.index);
  }
  return arrived;
}

uint32_t make_packet(Network& network, uint32_t source, uint32_t destination, uint32_t wire_bytes, uint64_t tuple) {
  const uint32_t index = network.new_packet();
  network.packet(index) = Packet{.tuple = tuple,
                                 .remote_address = 0,
                                 .source = source,
                                 .destination = destination,
                                 .endpoint = 0,
                                 .generation = 0,
                                 .wire_bytes = wire_bytes,
                                 .payload_bytes = wire_bytes,
                                 .immediate = 0,
                                 .rkey = 0,
                                 .link = 0,
                                 .path = 0,
                                 .is_control = false,
                                 .is_marked = false,
                                 .is_urgent = false};
  return index;
}

}  // namespace

TEST_CASE("Events come out by time; events of the same time keep their order") {
  uint64_t draws = 0;
  const auto below = [&](uint64_t bound) { return mix(++draws) % bound; };
  EventQueue queue;
  using Entry = std::tuple<uint64_t, uint32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> expected;
  uint32_t pushed = 0;
  for (int step = 0; step < 200'000; ++step) {
    if (expected.empty() || below(100) < 55) {
      // Few distinct times near by, and now and then one far away.
      const uint64_t at_ps = queue.now_ps() + (below(100) == 0 ? below(1ull << 40) : below(50));
      queue.push({at_ps, Event::Kind::timer, pushed});
      expected.emplace(at_ps, pushed++);
    } else {
      const Event event = queue.pop();
      REQUIRE(Entry{event.at_ps, event.index} == expected.top());
      REQUIRE(queue.now_ps() == event.at_ps);
      expected.pop();
    }
    REQUIRE(queue.empty() == expected.empty());
  }
}

TEST_CASE("Routes are all the shortest paths") {
  for (const TopologyConfig& config : {TWO_TIERS, THREE_TIERS}) {
    const Topology topology(config);
    Routing routing(topology, 1);
    std::vector<bool> is_up(topology.links().size(), true);
    routing.compute(is_up);
    CHECK(routing.is_connected());
    for (uint32_t leaf = 1; leaf < topology.leaf_count(); ++leaf) {
      CHECK(routing.next_hops(topology.leaf_node(0), leaf).size() == config.spines);
      CHECK(routing.next_hops(topology.leaf_node(leaf), leaf).empty());
    }
    // Without the link from leaf 3 to its first spine, no path to or from leaf 3 uses that spine.
    const uint32_t cable = topology.first_fabric_cable() + 3 * config.spines;
    is_up[Topology::up_link(cable)] = is_up[Topology::down_link(cable)] = false;
    routing.compute(is_up);
    CHECK(routing.is_connected());
    CHECK(routing.next_hops(topology.leaf_node(0), 3).size() == config.spines - 1);
    CHECK(routing.next_hops(topology.leaf_node(3), 0).size() == config.spines - 1);
    CHECK(routing.next_hops(topology.leaf_node(0), 2).size() == config.spines);
    // Routing notices a leaf without any link.
    for (uint32_t spine = 0; spine < config.spines; ++spine)
      is_up[Topology::up_link(cable + spine)] = is_up[Topology::down_link(cable + spine)] = false;
    routing.compute(is_up);
    CHECK_FALSE(routing.is_connected());
  }
}

TEST_CASE("A packet takes as many hops as the tiers between its hosts need") {
  const Topology topology(THREE_TIERS);
  EventQueue events;
  Network network(topology, {.delay_ns = 1'000}, 1, events);
  std::map<uint64_t, uint32_t> pairs_by_hops;
  for (uint32_t from = 0; from < topology.host_count(); ++from)
    for (uint32_t to = 0; to < topology.host_count(); ++to) {
      if (from == to) continue;
      const uint64_t start_ps = events.now_ps();
      const uint64_t hops_before = network.counters().hops;
      network.send(make_packet(network, from, to, 1'000, mix(from, to)));
      const auto arrived = drain(network, events);
      REQUIRE(arrived.size() == 1);
      const uint64_t hops = network.counters().hops - hops_before;
      // 1,000 bytes at 100 Gb/s take 80 ns, and a hop 1 us.
      CHECK(arrived[0].first - start_ps == hops * 1'080'000);
      ++pairs_by_hops[hops];
    }
  // 4 hosts on a leaf, 16 in a pod, 64 in all.
  CHECK(pairs_by_hops == std::map<uint64_t, uint32_t>{{2, 64 * 3}, {4, 64 * 12}, {6, 64 * 48}});
}

TEST_CASE("ECMP spreads tuples evenly, keeps each on one path, and hashes anew at the next tier") {
  const Topology topology(THREE_TIERS);
  Routing routing(topology, 7);
  routing.compute(std::vector<bool>(topology.links().size(), true));
  const uint32_t leaf = topology.leaf_node(0);
  const auto group = routing.next_hops(leaf, 15);
  REQUIRE(group.size() == 4);
  constexpr uint32_t TUPLES = 40'000;
  std::map<uint32_t, uint32_t> by_link;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> by_two_links;
  for (uint64_t tuple = 0; tuple < TUPLES; ++tuple) {
    const uint32_t link = routing.pick(group, leaf, mix(tuple));
    REQUIRE(link == routing.pick(group, leaf, mix(tuple)));
    ++by_link[link];
    const uint32_t spine = topology.links()[link].to;
    ++by_two_links[{link, routing.pick(routing.next_hops(spine, 15), spine, mix(tuple))}];
  }
  CHECK(by_link.size() == 4);
  // Five standard deviations of a binomial distribution.
  for (const auto& [link, count] : by_link) CHECK(std::abs(static_cast<int>(count) - 10'000) < 5 * 87);
  CHECK(by_two_links.size() == 16);
  for (const auto& [links, count] : by_two_links) CHECK(std::abs(static_cast<int>(count) - 2'500) < 5 * 49);
}

TEST_CASE("Incast: a queue fills to its limit, marks by its thresholds, and drops only the excess") {
  const Topology topology({.hosts = 8, .hosts_per_leaf = 8, .spines = 1});
  EventQueue events;
  const LinkConfig link{.queue_limit_bytes = 50'000, .mark_min_bytes = 20'000, .mark_max_bytes = 20'000};
  Network network(topology, link, 1, events);
  constexpr uint32_t PACKETS = 20, BYTES = 1'000;
  for (uint32_t packet = 0; packet < PACKETS; ++packet)
    for (uint32_t host = 1; host < 8; ++host) network.send(make_packet(network, host, 0, BYTES, 0));
  uint32_t marked = 0, arrived = 0;
  while (!events.empty()) {
    const Event event = events.pop();
    if (!network.arrive(event.index)) continue;
    marked += network.packet(event.index).is_marked;
    ++arrived;
    network.free_packet(event.index);
  }
  const NetworkCounters& counters = network.counters();
  CHECK(counters.sent_packets == 7 * PACKETS);
  CHECK(counters.sent_packets == arrived + counters.queue_dropped_packets);
  CHECK(counters.marked_packets == marked);
  CHECK(network.packets_in_flight() == 0);
  const LinkCounters& port = network.link_counters()[Topology::down_link(0)];
  // Seven arrive while one leaves. So the queue fills to the last packet that fits, and stays full.
  CHECK(port.peak_queue_bytes == 50'000);
  CHECK(port.dropped_packets == counters.queue_dropped_packets);
  CHECK(port.dropped_packets > 60);
  CHECK(port.carried_bytes == uint64_t{arrived} * BYTES);
  // Packets that found 20,000 bytes before them are marked: all but the first 20 or so.
  CHECK(marked >= arrived - 30);
  CHECK(marked < arrived - 15);
}

TEST_CASE("A dead link swallows packets until routing converges") {
  const Topology topology(TWO_TIERS);
  EventQueue events;
  Network network(topology, {.queue_limit_bytes = 1u << 30}, 3, events);
  const uint32_t cable = topology.first_fabric_cable();  // leaf 0 to spine 0
  const auto send_all = [&] {
    const uint64_t before = network.counters().black_holed_packets;
    for (uint64_t tuple = 0; tuple < 8'000; ++tuple)
      network.send(make_packet(network, static_cast<uint32_t>(tuple % 8), 63, 500, mix(tuple)));
    const size_t arrived = drain(network, events).size();
    const uint64_t lost = network.counters().black_holed_packets - before;
    CHECK(arrived + lost == 8'000);
    return lost;
  };
  CHECK(send_all() == 0);
  network.fail_cables(std::span(&cable, 1));
  const uint64_t lost = send_all();
  CHECK(lost > 800);
  CHECK(lost < 1'200);  // one of eight spines
  network.converge();
  CHECK(send_all() == 0);
  CHECK(network.counters().queue_dropped_packets == 0);
}

TEST_CASE("Shapes and links out of range are refused with value and range") {
  const auto message_of = [](const TopologyConfig& config) -> std::string {
    try {
      const Topology topology(config);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  CHECK(message_of({.hosts = 1}) == "hosts is 1; allowed: 2..65536");
  CHECK(message_of({.hosts = 10, .hosts_per_leaf = 3}) == "hosts_per_leaf is 3; allowed: a divisor of hosts (10)");
  CHECK(message_of({.spines = 0}) == "spines is 0; allowed: 1..1024");
  CHECK(message_of({.cores_per_spine = 1}) == "cores_per_spine takes three tiers (leaves_per_pod)");
  CHECK(message_of({.leaves_per_pod = 5}) == "leaves_per_pod is 5; allowed: a divisor of the leaves (32)");
  EventQueue events;
  const Topology topology(TWO_TIERS);
  CHECK_THROWS_WITH(Network(topology, {.rate_gbps = 0}, 1, events), "rate_gbps is 0; allowed: 1..1600");
  CHECK_THROWS_WITH(Network(topology, {.mark_min_bytes = 2, .mark_max_bytes = 1}, 1, events),
                    "mark_min_bytes is 2; allowed: 0 to mark_max_bytes (1)");
  CHECK_THROWS_WITH(topology.choose_cables(1.5, 1), "the failed fraction is 1.500000; allowed: 0 to 1");
  CHECK(topology.choose_cables(0.0001, 1).size() == 1);
}
