// SPDX-License-Identifier: Apache-2.0
#include "model/schedule.hpp"

#include <algorithm>
#include <bit>

#include "sim.hpp"

namespace sennit::model {
namespace {

constexpr uint64_t SECOND_US = 1'000'000;
// Beyond this loss a peer may be silent for its whole timeout by chance.
constexpr uint32_t MAX_SAFE_LOSS = 65'536 / 4;
constexpr uint32_t MAX_SAFE_BURST_PACKETS = 4;
// The same where paths are dead for ever, because the other paths then have their turn less often.
constexpr uint32_t MAX_SAFE_LOSS_OF_FEW = 65'536 / 64;
// Every peer timeout from PATIENT_TIMEOUT_US on survives an outage as long as this, back-off included.
constexpr uint64_t LONG_OUTAGE_US = 1 * SECOND_US;
constexpr uint64_t PATIENT_TIMEOUT_US = 5 * SECOND_US;

template <typename T, size_t N>
T pick(SimRandom& random, const T (&choices)[N]) {
  return choices[random.below(N)];
}

// Draws small and large values alike: uniform in the number of bits.
uint32_t spread(SimRandom& random, uint32_t bits) {
  return static_cast<uint32_t>(random.below(uint64_t{1} << random.below(bits + 1)));
}

bool chance(SimRandom& random, uint32_t of_100) { return random.below(100) < of_100; }

flow::FlowConfig draw_config(SimRandom& random) {
  flow::FlowConfig config;
  config.path_count = pick(random, {1u, 1u, 2u, 2u, 3u, 4u, 4u, 8u});
  config.payload_max_bytes = chance(random, 90) ? 64 : PAYLOAD_MAX_BYTES;
  config.eager_slot_count = pick(random, {8u, 8u, 16u, 32u});
  config.window_bytes = static_cast<uint32_t>(1 + random.below(64)) * config.payload_max_bytes;
  config.ack_every_packets = 1 + spread(random, 5);
  config.ack_delay_us = 1 + spread(random, 10);
  config.peer_timeout_us = pick(random, {50'000ul, 300'000ul, 1 * SECOND_US, 5 * SECOND_US, 10 * SECOND_US});
  config.seed = random.next();
  config.rail_count = static_cast<uint32_t>(1 + random.below(config.path_count));
  config.target_queue_us = 1 + spread(random, 9);
  return config;
}

LinkDraw draw_link(SimRandom& random, bool is_calm, uint32_t common_delay_us) {
  LinkDraw link{};
  link.delay_us = chance(random, 70) ? common_delay_us : 1 + spread(random, 9);
  if (chance(random, 30)) {
    link.packet_ns = 100 + spread(random, 15);
    link.queue_packets = chance(random, 50) ? 4 + spread(random, 6) : UINT32_MAX;
    link.mark_packets = chance(random, 40) ? 1 + spread(random, 4) : UINT32_MAX;
  }
  if (is_calm) return link;
  if (chance(random, 40)) link.jitter_us = spread(random, 10);
  if (chance(random, 60)) link.loss = spread(random, 14);
  link.burst_packets = chance(random, 20) ? 2 + spread(random, 4) : 1;
  if (chance(random, 30)) link.corruption = spread(random, 13);
  if (chance(random, 30)) link.duplication = spread(random, 15);
  return link;
}

uint32_t draw_size(SimRandom& random, const flow::FlowConfig& config, bool is_eager, uint32_t max_packets) {
  if (chance(random, 10)) return 0;
  if (is_eager) return static_cast<uint32_t>(random.below(config.payload_max_bytes - flow::EAGER_HEADER_BYTES + 1));
  const auto bytes = static_cast<uint32_t>(1 + random.below(uint64_t{max_packets} * config.payload_max_bytes));
  // Whole packets are a border case of their own.
  return chance(random, 30) ? std::max(bytes - bytes % config.payload_max_bytes, 1u) : bytes;
}

void draw_messages(SimRandom& random, const flow::FlowConfig& config, RankDraw& rank) {
  uint32_t max_packets = 12, eager_of_100 = 40;
  rank.message_count = static_cast<uint32_t>(random.below(6));
  switch (random.below(32)) {
    case 0:  // one long one
      rank.message_count = 1;
      eager_of_100 = 0;
      max_packets = MESSAGE_MAX_PACKETS - 1;
      break;
    case 1:  // many short ones
      rank.message_count = MESSAGES_MAX;
      eager_of_100 = pick(random, {0u, 50u, 100u});
      max_packets = 2;
      break;
    default:
      break;
  }
  const uint32_t spread_us = chance(random, 50) ? 0 : 1 + spread(random, 14);
  for (uint32_t index = 0; index < rank.message_count; ++index) {
    MessageDraw& message = rank.messages[index];
    message.is_eager = chance(random, eager_of_100);
    message.size_bytes = draw_size(random, config, message.is_eager, max_packets);
    message.send_us = static_cast<uint32_t>(random.below(spread_us + 1));
    message.receive_us = static_cast<uint32_t>(random.below(spread_us + 1));
  }
}

void draw_rank(SimRandom& random, const flow::FlowConfig& config, bool is_calm, uint32_t delay_us, RankDraw& rank) {
  rank.clock_us = pick(random, {uint64_t{0}, random.below(1'000), random.below(uint64_t{1} << 50)});
  rank.tick_us = chance(random, 70) ? 1 : 1 + spread(random, 9);
  rank.batch_packets = pick(random, {1u, 4u, 15u});
  rank.open_receives = pick(random, {1u, 4u, 16u, MESSAGES_MAX});
  rank.deferral = chance(random, 15) ? 20'000 : 0;
  rank.scribble = chance(random, 30) ? 16'384 : 0;
  rank.waits = chance(random, 50);
  rank.path_policy = pick<std::string_view>(random, {"round_robin", "reps"});
  rank.congestion = pick<std::string_view>(random, {"dctcp", "fixed", "swift"});
  rank.has_budget = chance(random, 40);
  rank.budget.min_bytes = (1 + spread(random, 4)) * config.payload_max_bytes;
  rank.budget.start_bytes = rank.budget.min_bytes + spread(random, 12);
  rank.budget.max_bytes = rank.budget.start_bytes + spread(random, 14);
  rank.budget.target_queue_us = config.target_queue_us;
  rank.is_restless = chance(random, 20);
  rank.closes = chance(random, 30);
  draw_messages(random, config, rank);
  for (uint32_t path = 0; path < config.path_count; ++path) rank.links[path] = draw_link(random, is_calm, delay_us);
}

Fault draw_fault(SimRandom& random, const flow::FlowConfig& config) {
  using Kind = Fault::Kind;
  Fault fault{};
  fault.kind = pick(random, {Kind::black_hole, Kind::black_hole, Kind::black_hole, Kind::black_hole, Kind::freeze,
                             Kind::death, Kind::abort, Kind::close});
  fault.rank = static_cast<uint32_t>(random.below(2));
  fault.paths = static_cast<uint32_t>(chance(random, 30) ? ~0u : random.next()) & ((1u << config.path_count) - 1);
  fault.directions = pick(random, {1u, 2u, 3u, 3u});
  fault.from_us = chance(random, 20) ? 0 : spread(random, 14);
  const bool is_endless = fault.kind == Kind::black_hole && chance(random, 20);
  fault.until_us = is_endless ? NEVER : fault.from_us + 1 + spread(random, 21);
  fault.noticed_us = chance(random, 30) ? fault.from_us + spread(random, 12) : NEVER;
  return fault;
}

// Whether this is something that a flow must survive, judged only from the draw.
bool must_complete(const Schedule& schedule) {
  const flow::FlowConfig& config = schedule.config;
  uint64_t outage_us = 0;
  uint32_t open_paths[2] = {(1u << config.path_count) - 1, (1u << config.path_count) - 1};
  for (uint32_t index = 0; index < schedule.fault_count; ++index) {
    const Fault& fault = schedule.faults[index];
    if (fault.kind != Fault::Kind::black_hole && fault.kind != Fault::Kind::freeze) return false;
    if (fault.until_us != NEVER) {
      outage_us += fault.until_us - fault.from_us;
      continue;
    }
    for (uint32_t rank = 0; rank < 2; ++rank)
      if ((fault.directions >> rank & 1) != 0) open_paths[rank] &= ~fault.paths;
  }
  // A flow survives one of four planes. It finds one of eight paths too late for a hundred messages in a row.
  for (const uint32_t open : open_paths)
    if (static_cast<uint32_t>(std::popcount(open)) * 4 < config.path_count) return false;
  const uint32_t all_paths = (1u << config.path_count) - 1;
  const bool are_few = open_paths[0] != all_paths || open_paths[1] != all_paths;
  for (const RankDraw& rank : schedule.ranks)
    for (uint32_t path = 0; path < config.path_count; ++path) {
      const LinkDraw& link = rank.links[path];
      // With back-off, this many repetitions in a row take longer than any peer timeout.
      if (link.loss != 0 && link.burst_packets > MAX_SAFE_BURST_PACKETS) return false;
      if ((link.loss + link.corruption) * link.burst_packets > (are_few ? MAX_SAFE_LOSS_OF_FEW : MAX_SAFE_LOSS))
        return false;
    }
  return outage_us <= LONG_OUTAGE_US && config.peer_timeout_us >= PATIENT_TIMEOUT_US;
}

// Every packet arrives, after one delay. Only the ranks' threads pause now and then.
void draw_pauses(SimRandom& random, Schedule& schedule) {
  schedule.loses_nothing = true;
  LinkDraw link{};
  link.delay_us = 1 + spread(random, 9);
  link.burst_packets = 1;
  for (RankDraw& rank : schedule.ranks)
    for (uint32_t path = 0; path < schedule.config.path_count; ++path) rank.links[path] = link;
  schedule.fault_count = FAULTS_MAX;
  for (Fault& fault : schedule.faults) {
    fault = {};
    fault.kind = Fault::Kind::freeze;
    fault.rank = static_cast<uint32_t>(random.below(2));
    fault.from_us = spread(random, 14);
    fault.until_us = fault.from_us + 1'000 + random.below(20'000);
    fault.noticed_us = NEVER;
  }
}

}  // namespace

void draw(uint64_t seed, Schedule& out) {
  // Neighbouring seeds must not be shifted copies of each other, so the state is mixed first.
  SimRandom random(SimRandom(seed).next());
  out.seed = seed;
  out.config = draw_config(random);
  const bool is_calm = chance(random, 25);
  const uint32_t delay_us = 1 + spread(random, 9);
  for (RankDraw& rank : out.ranks) draw_rank(random, out.config, is_calm, delay_us, rank);
  out.fault_count = chance(random, 40) ? 0 : static_cast<uint32_t>(1 + random.below(FAULTS_MAX));
  for (uint32_t index = 0; index < out.fault_count; ++index) out.faults[index] = draw_fault(random, out.config);
  out.loses_nothing = false;
  if (chance(random, 10)) draw_pauses(random, out);
  uint64_t quiet_us = 0;
  for (uint32_t index = 0; index < out.fault_count; ++index) {
    const Fault& fault = out.faults[index];
    quiet_us = std::max(quiet_us, fault.until_us != NEVER ? fault.until_us : fault.from_us);
  }
  out.deadline_us = quiet_us + 2 * out.config.peer_timeout_us + 10 * SECOND_US;
  out.must_complete = must_complete(out);
}

std::string describe(const Schedule& schedule) {
  static constexpr const char* KINDS[] = {"black hole", "freeze", "death", "abort", "close"};
  const auto number = [](uint64_t value) { return value == NEVER ? std::string("never") : std::to_string(value); };
  const flow::FlowConfig& config = schedule.config;
  std::string text = "seed " + number(schedule.seed) + ": " + number(config.path_count) + " paths, payload " +
                     number(config.payload_max_bytes) + ", eager slots " + number(config.eager_slot_count) +
                     ", window " + number(config.window_bytes / config.payload_max_bytes) + " packets, ack every " +
                     number(config.ack_every_packets) + " or " + number(config.ack_delay_us) + " us, peer timeout " +
                     number(config.peer_timeout_us) + " us, deadline " + number(schedule.deadline_us) + " us" +
                     (schedule.must_complete ? ", must complete" : "") +
                     (schedule.loses_nothing ? ", loses nothing" : "") + "\n";
  for (uint32_t side = 0; side < 2; ++side) {
    const RankDraw& rank = schedule.ranks[side];
    text += "rank " + number(side) + ": clock " + number(rank.clock_us) + ", tick " + number(rank.tick_us) +
            " us, batch " + number(rank.batch_packets) + ", open receives " + number(rank.open_receives) +
            std::string(rank.waits ? ", waits" : "") + std::string(", ").append(rank.path_policy).append(", ") +
            std::string(rank.congestion) + (rank.has_budget ? ", budget from " + number(rank.budget.start_bytes) : "") +
            (rank.deferral != 0 ? ", defers" : "") + (rank.scribble != 0 ? ", scribbles" : "") +
            (rank.is_restless ? ", restless" : "") + (rank.closes ? ", closes" : "") + "\n";
    for (uint32_t index = 0; index < rank.message_count; ++index) {
      const MessageDraw& message = rank.messages[index];
      text += "  message " + number(index) + (message.is_eager ? " eager " : " bulk ") + number(message.size_bytes) +
              " bytes, sent at " + number(message.send_us) + ", received at " + number(message.receive_us) + "\n";
    }
    for (uint32_t path = 0; path < config.path_count; ++path) {
      const LinkDraw& link = rank.links[path];
      text += "  path " + number(path) + ": delay " + number(link.delay_us) + " us, jitter " + number(link.jitter_us) +
              " us, packet " + number(link.packet_ns) + " ns, queue " + number(link.queue_packets) + ", marks from " +
              number(link.mark_packets) + ", of 65536 lost " + number(link.loss) + " in bursts of " +
              number(link.burst_packets) + ", corrupt " + number(link.corruption) + ", twice " +
              number(link.duplication) + "\n";
    }
  }
  for (uint32_t index = 0; index < schedule.fault_count; ++index) {
    const Fault& fault = schedule.faults[index];
    text += std::string("fault: ") + KINDS[static_cast<size_t>(fault.kind)] + ", rank " + number(fault.rank) +
            ", paths " + number(fault.paths) + ", directions " + number(fault.directions) + ", from " +
            number(fault.from_us) + " until " + number(fault.until_us) + ", noticed " + number(fault.noticed_us) +
            " us\n";
  }
  return text;
}

}  // namespace sennit::model
