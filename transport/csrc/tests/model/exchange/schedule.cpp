// SPDX-License-Identifier: Apache-2.0
#include "model/exchange/schedule.hpp"

#include <algorithm>
#include <utility>

#include "sim.hpp"

namespace sennit::model::exchange {
namespace {

bool chance(SimRandom& random, uint32_t of_100) { return random.below(100) < of_100; }

uint32_t below(SimRandom& random, uint32_t bound) { return static_cast<uint32_t>(random.below(bound)); }

// Half of all worlds are of one host, the others of any.
void draw_hosts(SimRandom& random, Schedule& out) {
  const uint32_t count = chance(random, 50) ? 1 : 2 + below(random, out.world - 1);
  for (uint32_t& host : out.hosts) host = below(random, count);
  constexpr uint32_t PAYLOADS[] = {64, 128, 256};
  NetworkSettings& network = out.network;
  network.path_count = 1 + below(random, PATHS_MAX);
  network.payload_bytes = PAYLOADS[random.below(std::size(PAYLOADS))];
  network.window_packets = 4 + below(random, 60);
  network.delay_us = below(random, 50);
  network.jitter_us = below(random, 2) * below(random, 50);
  network.loss_of_1000 = chance(random, 50) ? 0 : below(random, 100);
  network.losses_max = below(random, 20);
}

// Around what is eager, what fits a block and what is placed.
uint32_t draw_size(SimRandom& random) {
  constexpr uint64_t EDGES[] = {0, SHM_EAGER_MAX_BYTES, MAX_LOAN_BYTES, PLACED_MAX_BYTES, 3 * MAX_LOAN_BYTES};
  const uint64_t edge = EDGES[random.below(std::size(EDGES))];
  if (chance(random, 40)) return static_cast<uint32_t>(edge + random.below(3));
  return below(random, 1 + below(random, 4 * static_cast<uint32_t>(MAX_LOAN_BYTES)));
}

void draw_channels(SimRandom& random, Schedule& out) {
  out.channels.resize(below(random, 2 * out.world + 1));
  for (Channel& channel : out.channels) {
    channel.to = below(random, out.world);
    channel.tag = static_cast<uint32_t>(&channel - out.channels.data());
    channel.has_senders = chance(random, 40);
    channel.to_thread = below(random, THREADS_MAX);
    for (uint32_t& thread : channel.from_threads) thread = below(random, THREADS_MAX);
    // Many small ones fill what is kept of unexpected messages.
    channel.size_bytes = chance(random, 60) ? below(random, SHM_EAGER_MAX_BYTES + 1) : draw_size(random);
    channel.size_bytes = std::max(channel.size_bytes, NUMBER_BYTES);
  }
}

uint32_t other_rank(SimRandom& random, uint32_t world, uint32_t rank) {
  return (rank + 1 + below(random, world - 1)) % world;
}

void draw_message(SimRandom& random, const Schedule& schedule, bool is_few_pairs, Message& out) {
  out = {};
  out.channel = schedule.channels.empty() || chance(random, 40)
                    ? NONE
                    : below(random, static_cast<uint32_t>(schedule.channels.size()));
  out.hold_until = NONE;
  out.is_from_heap = chance(random, 50);
  out.is_to_heap = chance(random, 50);
  if (out.channel != NONE) {
    const Channel& channel = schedule.channels[out.channel];
    out.to = channel.to;
    // Where some receives name their sender, there is one.
    out.is_any = channel.has_senders || chance(random, 30);
    out.from = channel.has_senders ? other_rank(random, schedule.world, out.to) : (out.to + 1) % schedule.world;
    out.size_bytes = channel.size_bytes;
    return;
  }
  out.to = is_few_pairs ? 0 : below(random, schedule.world);
  out.from = is_few_pairs ? 1 : other_rank(random, schedule.world, out.to);
  out.size_bytes = draw_size(random);
  if (out.size_bytes == 0 || out.size_bytes > MAX_LOAN_BYTES || chance(random, 40)) {
    out.use = chance(random, 30) ? Lane::Use::lend : Lane::Use::copy;
    return;
  }
  out.is_loan = true;
  constexpr Lane::Use USES[] = {Lane::Use::copy, Lane::Use::lend, Lane::Use::round_trip};
  out.use = USES[random.below(schedule.share_memory(out.from, out.to) ? 3 : 2)];
  out.hold_rounds = chance(random, 50) ? below(random, 4) : below(random, 60);
}

struct Placed {
  uint64_t at;
  uint32_t message;
};

}  // namespace

void draw(uint64_t seed, Schedule& out) {
  SimRandom random(seed);
  out.seed = seed;
  out.world = 2 + below(random, chance(random, 50) ? 2 : RANKS_MAX - 1);
  draw_hosts(random, out);
  draw_channels(random, out);
  out.messages.resize(1 + below(random, chance(random, 30) ? 80 : 20));
  const bool is_few_pairs = chance(random, 20);
  const uint32_t count = static_cast<uint32_t>(out.messages.size());
  std::vector<uint64_t> send_at(count), receive_at(count);
  // Posted about when the message is due, or at any time.
  const uint64_t spread = uint64_t{1} << below(random, 12);
  for (uint32_t number = 0; number < count; ++number) {
    draw_message(random, out, is_few_pairs, out.messages[number]);
    send_at[number] = number * 64 + random.below(spread);
    receive_at[number] = number * 64 + random.below(spread);
  }
  // Which send meets which receive of a channel follows from their order. The loans of two ranks are asked for in the
  // order in which they are sent, as collectives are posted in one order: a lane grants few at a time.
  const auto pair_in_order = [&](auto belongs) {
    std::vector<uint64_t> receives;
    std::vector<Placed> sends;
    for (uint32_t number = 0; number < count; ++number) {
      if (!belongs(out.messages[number])) continue;
      receives.push_back(receive_at[number]);
      sends.push_back({send_at[number], number});
    }
    std::ranges::sort(receives);
    std::ranges::stable_sort(sends, {}, &Placed::at);
    for (size_t at = 0; at < sends.size(); ++at) receive_at[sends[at].message] = receives[at];
  };
  for (uint32_t channel = 0; channel < out.channels.size(); ++channel)
    pair_in_order([&](const Message& message) { return message.channel == channel; });
  for (uint32_t from = 0; from < out.world; ++from)
    for (uint32_t to = 0; to < out.world; ++to)
      pair_in_order(
          [&](const Message& message) { return message.is_loan && message.from == from && message.to == to; });
  struct Due {
    uint64_t at;
    Call call;
  };
  std::vector<Due> due;
  for (uint32_t number = 0; number < count; ++number) {
    Message& message = out.messages[number];
    const Channel* const channel = message.channel == NONE ? nullptr : &out.channels[message.channel];
    // One thread asks for all loans, and one sends all of them.
    const uint32_t any_thread = message.is_loan ? 0 : below(random, THREADS_MAX);
    const uint32_t from_thread =
        channel == nullptr ? any_thread : channel->from_threads[channel->has_senders ? message.from : 0];
    const uint32_t to_thread = channel == nullptr ? any_thread : channel->to_thread;
    due.push_back({send_at[number], {Call::Kind::send, message.from, from_thread, number}});
    due.push_back({receive_at[number], {Call::Kind::receive, message.to, to_thread, number}});
    uint64_t both = std::max(send_at[number], receive_at[number]);
    if (chance(random, 50))
      due.push_back({both + 1 + random.below(spread), {Call::Kind::await_receive, message.to, to_thread, number}});
    // Which of several senders a receive takes first is not known before.
    if (channel != nullptr && channel->has_senders) both = UINT64_MAX / 2;
    if (chance(random, 40))
      due.push_back({both + 1 + random.below(spread), {Call::Kind::await_send, message.from, from_thread, number}});
    if (!message.is_loan || chance(random, 50)) continue;
    // A loan is held until a message that both sides posted before is complete, on the way in or out.
    for (uint32_t tries = 0; tries < 4; ++tries) {
      const uint32_t until = below(random, count);
      const Message& other = out.messages[until];
      const bool is_ours = other.from == message.to || other.to == message.to;
      const bool is_open = other.channel != NONE && out.channels[other.channel].has_senders;
      if (!is_ours || is_open || std::max(send_at[until], receive_at[until]) >= receive_at[number]) continue;
      message.hold_until = until;
      break;
    }
  }
  std::ranges::stable_sort(due, {}, &Due::at);
  out.calls.clear();
  for (const Due& one : due) out.calls.push_back(one.call);
  constexpr Fault::Kind KINDS[] = {Fault::Kind::none,   Fault::Kind::none,  Fault::Kind::pause,
                                   Fault::Kind::freeze, Fault::Kind::abort, Fault::Kind::leave};
  out.fault = {KINDS[random.below(std::size(KINDS))], below(random, out.world), below(random, 40 + 8 * count),
               below(random, 200)};
}

std::string describe(const Schedule& schedule) {
  constexpr const char* FAULTS[] = {"none", "pause", "freeze", "abort", "leave"};
  constexpr const char* CALLS[] = {"send", "receive", "await send", "await receive"};
  constexpr const char* USES[] = {"copy", "lend", "round trip"};
  std::string text = std::to_string(schedule.world) +
                     " ranks; fault: " + FAULTS[static_cast<size_t>(schedule.fault.kind)] + " of rank " +
                     std::to_string(schedule.fault.rank) + " at turn " + std::to_string(schedule.fault.at_turn) +
                     "; hosts:";
  for (uint32_t rank = 0; rank < schedule.world; ++rank) text.append(" ").append(std::to_string(schedule.hosts[rank]));
  const NetworkSettings& network = schedule.network;
  text += "; " + std::to_string(network.path_count) + " paths, " + std::to_string(network.payload_bytes) +
          " bytes a packet, window " + std::to_string(network.window_packets) + " packets, loses " +
          std::to_string(network.losses_max) + " packets at most\n";
  for (size_t number = 0; number < schedule.messages.size(); ++number) {
    const Message& message = schedule.messages[number];
    text += "message " + std::to_string(number) + ": " + std::to_string(message.from) + " to " +
            std::to_string(message.to) + ", " + std::to_string(message.size_bytes) + " bytes, " +
            USES[static_cast<size_t>(message.use)];
    if (message.channel != NONE)
      text += ", tag " + std::to_string(message.channel) + (message.is_any ? " from any" : "");
    if (message.is_loan) text += ", held for " + std::to_string(message.hold_rounds) + " rounds";
    if (message.hold_until != NONE) text += " and until message " + std::to_string(message.hold_until);
    text += "\n";
  }
  for (const Call& call : schedule.calls)
    text += "rank " + std::to_string(call.rank) + " thread " + std::to_string(call.thread) + ": " +
            CALLS[static_cast<size_t>(call.kind)] + " " + std::to_string(call.message) + "\n";
  return text;
}

}  // namespace sennit::model::exchange
