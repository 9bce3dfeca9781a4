// SPDX-License-Identifier: Apache-2.0
#include "fabric/workload.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "fabric/hash.hpp"

namespace sennit::fabric {
namespace {

using Kind = WorkloadConfig::Kind;

const WorkloadConfig& checked(const WorkloadConfig& config, uint32_t hosts) {
  const auto require = [](bool condition, const std::string& what) {
    if (!condition) throw std::invalid_argument(what);
  };
  const bool is_allreduce = config.kind == Kind::allreduce_direct || config.kind == Kind::allreduce_ring;
  require(config.size_bytes >= 1 && config.size_bytes <= uint64_t{1} << 40,
          "size_bytes is " + std::to_string(config.size_bytes) + "; allowed: 1 to 1 TiB");
  require(!is_allreduce || config.size_bytes % hosts == 0, "size_bytes is " + std::to_string(config.size_bytes) +
                                                               "; allowed for an allreduce: a multiple of hosts (" +
                                                               std::to_string(hosts) + ")");
  require(config.message_max_bytes >= 1, "message_max_bytes must be positive");
  require(config.peers_at_a_time >= 1 && config.peers_at_a_time <= 65'536,
          "peers_at_a_time is " + std::to_string(config.peers_at_a_time) + "; allowed: 1..65536");
  return config;
}

// A block between two hosts, cut into messages of nearly equal size.
class Cut {
 public:
  Cut(uint64_t block_bytes, uint64_t message_max_bytes)
      : block_bytes_(block_bytes), count_((block_bytes + message_max_bytes - 1) / message_max_bytes) {}
  uint64_t count() const { return count_; }
  uint64_t max_bytes() const { return (block_bytes_ + count_ - 1) / count_; }
  uint64_t size_bytes(uint64_t index) const {
    return block_bytes_ * (index + 1) / count_ - block_bytes_ * index / count_;
  }

 private:
  uint64_t block_bytes_, count_;
};

// Rounds of blocks from every host to every other host. A host starts a round when it has all blocks of the last one.
class AllToAll : public Workload {
 public:
  AllToAll(const WorkloadConfig& config, uint32_t hosts, uint64_t seed, uint64_t block_bytes, uint32_t rounds)
      : cut_(block_bytes, config.message_max_bytes),
        hosts_(hosts),
        rounds_(rounds),
        peers_at_a_time_(config.peers_at_a_time),
        distances_(hosts - 1) {
    std::iota(distances_.begin(), distances_.end(), 1);
    if (config.is_shuffled)
      for (uint32_t i = hosts - 1; i > 1; --i) std::swap(distances_[i - 1], distances_[mix(seed, i) % i]);
    states_.resize(hosts);
  }
  bool keeps_connections() const override { return false; }
  uint64_t message_max_bytes() const override { return cut_.max_bytes(); }
  bool is_done() const override { return done_hosts_ == hosts_; }

  void start(Exchange& exchange) override {
    // In turn, as for hosts that start together.
    for (uint32_t block = 0; block < peers_at_a_time_; ++block)
      for (uint32_t host = 0; host < hosts_; ++host) post_block(exchange, host);
  }
  void on_received(Exchange& exchange, const Message& message) override {
    State& state = states_[message.to];
    ++state.received;
    if (state.received % cut_.count() == 0) post_block(exchange, message.to);
    if (state.received != per_round() * (state.rounds_done + 1)) return;
    ++state.rounds_done;
    if (state.rounds_done == rounds_) {
      ++done_hosts_;
      return;
    }
    // The host has all parts of its share. Only now it has something to send in the next round.
    for (const Message& held : std::exchange(state.held, {})) exchange.ready(held);
  }

 private:
  struct State {
    uint64_t posted_blocks = 0, received = 0;
    uint32_t rounds_done = 0;
    std::vector<Message> held;  // posted by their receivers, not ready yet
  };
  uint64_t per_round() const { return uint64_t{hosts_ - 1} * cut_.count(); }

  void post_block(Exchange& exchange, uint32_t host) {
    const uint64_t block = states_[host].posted_blocks;
    if (block == uint64_t{hosts_ - 1} * rounds_) return;
    ++states_[host].posted_blocks;
    const auto round = static_cast<uint32_t>(block / (hosts_ - 1));
    const uint32_t distance = distances_[block % (hosts_ - 1)];
    const uint32_t from = (host + hosts_ - distance) % hosts_;
    for (uint64_t index = 0; index < cut_.count(); ++index) {
      const Message message{from, host, (uint64_t{round} * hosts_ + distance) * cut_.count() + index,
                            cut_.size_bytes(index)};
      exchange.post(message);
      if (states_[from].rounds_done >= round)
        exchange.ready(message);
      else
        states_[from].held.push_back(message);
    }
  }

  const Cut cut_;
  const uint32_t hosts_, rounds_, peers_at_a_time_;
  std::vector<uint32_t> distances_;
  std::vector<State> states_;
  uint32_t done_hosts_ = 0;
};

// Blocks that each host passes on to the next host as soon as they have come.
class Ring : public Workload {
 public:
  Ring(const WorkloadConfig& config, uint32_t hosts)
      : cut_(config.size_bytes / hosts, config.message_max_bytes),
        hosts_(hosts),
        window_messages_(config.peers_at_a_time * cut_.count()),
        posted_(hosts),
        received_(hosts) {}
  bool keeps_connections() const override { return true; }
  uint64_t message_max_bytes() const override { return cut_.max_bytes(); }
  bool is_done() const override { return done_hosts_ == hosts_; }

  void start(Exchange& exchange) override {
    for (uint64_t message = 0; message < window_messages_; ++message)
      for (uint32_t host = 0; host < hosts_; ++host) post_next(exchange, host);
    for (uint64_t index = 0; index < cut_.count(); ++index)
      for (uint32_t host = 0; host < hosts_; ++host) exchange.ready(message_to((host + 1) % hosts_, index));
  }
  void on_received(Exchange& exchange, const Message& message) override {
    if (++received_[message.to] == total()) ++done_hosts_;
    post_next(exchange, message.to);
    const uint64_t next = message.number + cut_.count();
    if (next < total()) exchange.ready(message_to((message.to + 1) % hosts_, next));
  }

 private:
  uint64_t total() const { return uint64_t{2} * (hosts_ - 1) * cut_.count(); }
  Message message_to(uint32_t host, uint64_t number) const {
    return {(host + hosts_ - 1) % hosts_, host, number, cut_.size_bytes(number % cut_.count())};
  }
  void post_next(Exchange& exchange, uint32_t host) {
    if (posted_[host] < total()) exchange.post(message_to(host, posted_[host]++));
  }

  const Cut cut_;
  const uint32_t hosts_;
  const uint64_t window_messages_;
  std::vector<uint64_t> posted_, received_;
  uint32_t done_hosts_ = 0;
};

// Sends one block between each pair, all at the same time.
class Once : public Workload {
 public:
  Once(const WorkloadConfig& config, std::vector<std::pair<uint32_t, uint32_t>> pairs)
      : cut_(config.size_bytes, config.message_max_bytes), pairs_(std::move(pairs)) {}
  bool keeps_connections() const override { return false; }
  uint64_t message_max_bytes() const override { return cut_.max_bytes(); }
  bool is_done() const override { return received_ == pairs_.size() * cut_.count(); }
  void start(Exchange& exchange) override {
    for (uint64_t number = 0; number < cut_.count(); ++number)
      for (const auto& [from, to] : pairs_) {
        const Message message{from, to, number, cut_.size_bytes(number)};
        exchange.post(message);
        exchange.ready(message);
      }
  }
  void on_received(Exchange&, const Message&) override { ++received_; }

 private:
  const Cut cut_;
  const std::vector<std::pair<uint32_t, uint32_t>> pairs_;
  uint64_t received_ = 0;
};

}  // namespace

std::unique_ptr<Workload> make_workload(const WorkloadConfig& config, uint32_t hosts, uint64_t seed) {
  checked(config, hosts);
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  switch (config.kind) {
    case Kind::alltoall:
      return std::make_unique<AllToAll>(config, hosts, seed, config.size_bytes, 1);
    case Kind::allreduce_direct:
      return std::make_unique<AllToAll>(config, hosts, seed, config.size_bytes / hosts, 2);
    case Kind::allreduce_ring:
      return std::make_unique<Ring>(config, hosts);
    case Kind::permutation:
      for (uint32_t host = 0; host < hosts; ++host) pairs.emplace_back(host, (host + hosts / 2) % hosts);
      break;
    case Kind::incast:
      for (uint32_t host = 1; host < hosts; ++host) pairs.emplace_back(host, 0);
      break;
  }
  return std::make_unique<Once>(config, std::move(pairs));
}

uint64_t pair_bytes(const WorkloadConfig& config, uint32_t hosts, uint32_t from, uint32_t to) {
  if (from == to) return 0;
  const uint64_t share_bytes = config.size_bytes / hosts;
  switch (config.kind) {
    case Kind::alltoall:
      return config.size_bytes;
    case Kind::allreduce_direct:
      return 2 * share_bytes;
    case Kind::allreduce_ring:
      return to == (from + 1) % hosts ? 2 * (hosts - 1) * share_bytes : 0;
    case Kind::permutation:
      return to == (from + hosts / 2) % hosts ? config.size_bytes : 0;
    case Kind::incast:
      return to == 0 ? config.size_bytes : 0;
  }
  return 0;
}

}  // namespace sennit::fabric
