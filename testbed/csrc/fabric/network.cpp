// SPDX-License-Identifier: Apache-2.0
#include "fabric/network.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace sennit::fabric {
namespace {

const LinkConfig& checked(const LinkConfig& config) {
  const auto require = [](bool condition, const std::string& what) {
    if (!condition) throw std::invalid_argument(what);
  };
  require(config.rate_gbps >= 1 && config.rate_gbps <= 1'600,
          "rate_gbps is " + std::to_string(config.rate_gbps) + "; allowed: 1..1600");
  require(config.delay_ns <= 1'000'000, "delay_ns is " + std::to_string(config.delay_ns) + "; allowed: 0..1000000");
  require(config.mark_min_bytes <= config.mark_max_bytes, "mark_min_bytes is " + std::to_string(config.mark_min_bytes) +
                                                              "; allowed: 0 to mark_max_bytes (" +
                                                              std::to_string(config.mark_max_bytes) + ")");
  return config;
}

}  // namespace

Network::Network(const Topology& topology, const LinkConfig& config, uint64_t seed, EventQueue& events)
    : topology_(topology),
      config_(checked(config)),
      ps_per_kilobyte_(8'000'000 / config.rate_gbps),
      events_(events),
      routing_(topology, mix(seed, 1)),
      is_up_(topology.links().size(), true),
      busy_until_ps_(topology.links().size()),
      urgent_until_ps_(topology.links().size()),
      link_counters_(topology.links().size()),
      random_(mix(seed, 2)) {
  routing_.compute(is_up_);
}

uint32_t Network::new_packet() {
  if (free_.empty()) {
    packets_.emplace_back();
    payloads_.emplace_back();
    return static_cast<uint32_t>(packets_.size() - 1);
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  return index;
}

void Network::send(uint32_t index) {
  ++counters_.sent_packets;
  packets_[index].is_marked = false;
  enqueue(index, topology_.links_from(packets_[index].source).front());
}

uint64_t Network::host_backlog_ps(uint32_t host) const {
  const uint64_t busy_until_ps = busy_until_ps_[topology_.links_from(host).front()];
  return busy_until_ps > events_.now_ps() ? busy_until_ps - events_.now_ps() : 0;
}

bool Network::is_marked_at(uint64_t queued_bytes) {
  if (queued_bytes < config_.mark_min_bytes) return false;
  if (queued_bytes >= config_.mark_max_bytes) return true;
  random_ = mix(random_);
  return random_ % (config_.mark_max_bytes - config_.mark_min_bytes) < queued_bytes - config_.mark_min_bytes;
}

void Network::lose(uint32_t index, uint64_t& counter) {
  ++counter;
  free_packet(index);
}

void Network::enqueue(uint32_t index, uint32_t link) {
  Packet& packet = packets_[index];
  LinkCounters& counters = link_counters_[link];
  if (!is_up_[link]) return lose(index, counters_.black_holed_packets);
  const uint64_t now_ps = events_.now_ps();
  uint64_t& busy_until_ps = busy_until_ps_[link];
  const uint64_t start_ps = std::max(busy_until_ps, now_ps);
  // A host's own queue is its memory. It neither drops nor marks, because the host looks at it before it sends.
  if (!topology_.is_host(topology_.links()[link].from)) {
    const uint64_t queued_bytes = (start_ps - now_ps) * 1'000 / ps_per_kilobyte_;
    if (queued_bytes + packet.wire_bytes > config_.queue_limit_bytes) {
      ++counters.dropped_packets;
      return lose(index, counters_.queue_dropped_packets);
    }
    counters.peak_queue_bytes = std::max(counters.peak_queue_bytes, queued_bytes + packet.wire_bytes);
    if (!packet.is_marked && is_marked_at(queued_bytes)) {
      packet.is_marked = true;
      ++counters_.marked_packets;
    }
  }
  counters.carried_bytes += packet.wire_bytes;
  const uint64_t own_ps = transmit_ps(packet.wire_bytes);
  busy_until_ps = start_ps + own_ps;
  longest_ps_ = std::max(longest_ps_, own_ps);
  uint64_t sent_ps = busy_until_ps;
  if (packet.is_urgent) {
    // Packets that are queued already are not delayed by it, only later ones: it takes a tenth of their time.
    uint64_t& urgent_until_ps = urgent_until_ps_[link];
    sent_ps = urgent_until_ps = std::max(urgent_until_ps, std::min(start_ps, now_ps + longest_ps_)) + own_ps;
  }
  packet.link = link;
  events_.push({sent_ps + config_.delay_ns * PS_PER_NS, Event::Kind::arrival, index});
}

bool Network::arrive(uint32_t index) {
  const Packet& packet = packets_[index];
  ++counters_.hops;
  // A link that dies loses the packets in its queue and in its cable.
  if (!is_up_[packet.link]) {
    lose(index, counters_.black_holed_packets);
    return false;
  }
  const uint32_t node = topology_.links()[packet.link].to;
  if (topology_.is_host(node)) {
    ++counters_.delivered_packets;
    return true;
  }
  const uint32_t leaf = topology_.leaf_of(packet.destination);
  if (node == topology_.leaf_node(leaf)) {
    enqueue(index, Topology::down_link(packet.destination));
    return false;
  }
  const std::span<const uint32_t> group = routing_.next_hops(node, leaf);
  if (group.empty()) {
    lose(index, counters_.black_holed_packets);
  } else {
    enqueue(index, routing_.pick(group, node, packet.tuple));
  }
  return false;
}

void Network::fail_cables(std::span<const uint32_t> cables) {
  for (const uint32_t cable : cables) is_up_[Topology::up_link(cable)] = is_up_[Topology::down_link(cable)] = false;
}

}  // namespace sennit::fabric
