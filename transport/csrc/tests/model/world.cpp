// SPDX-License-Identifier: Apache-2.0
#include "model/world.hpp"

#include <algorithm>

#include "model/violation.hpp"

namespace sennit::model {
namespace {

constexpr uint64_t MOST_HAPPENINGS = 100'000;
// Time after the operation's deadline for the last notices and their echoes.
constexpr uint64_t REST_US = 5'000'000;
// A rank in the middle of a message notices a silent peer at most this much later than its timeout, because its next
// round may be that far away.
constexpr uint64_t NOTICE_SLACK_US = 1'000'000;
constexpr const char* DEADLINE = "the operation's deadline has passed";
constexpr const char* FAILURE = "the program failed";

}  // namespace

World::Tally& World::Tally::operator+=(const Tally& other) {
  schedules += other.schedules;
  completed += other.completed;
  lost += other.lost;
  aborted += other.aborted;
  packets += other.packets;
  dropped += other.dropped;
  duplicated += other.duplicated;
  happenings += other.happenings;
  virtual_us += other.virtual_us;
  return *this;
}

void World::begin(uint64_t seed, bool is_verbose) {
  draw(seed, schedule_);
  network_.begin(schedule_);
  faults_applied_ = notices_given_ = 0;
  happenings_ = 0;
  is_late_ = false;
  for (uint32_t rank = 0; rank < 2; ++rank)
    directions_[rank].begin(schedule_, rank, ranks_[1 - rank].eager_memory(), ranks_[1 - rank].eager_rkey());
  for (uint32_t rank = 0; rank < 2; ++rank)
    ranks_[rank].begin(schedule_, network_, directions_[rank], directions_[1 - rank], is_verbose);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ranks_[rank].introduce(ranks_[1 - rank]);
    network_.summon(0, rank);
    network_.summon(schedule_.deadline_us, rank);
    for (uint32_t index = 0; index < schedule_.fault_count; ++index) {
      const Fault& fault = schedule_.faults[index];
      network_.summon(fault.from_us, rank);
      if (fault.kind == Fault::Kind::death && fault.noticed_us != NEVER) network_.summon(fault.noticed_us, rank);
    }
  }
}

void World::run(uint64_t seed, bool is_verbose, Tally& tally) {
  begin(seed, is_verbose);
  run_until_rest();
  judge();
  ++tally.schedules;
  if (ranks_[0].is_complete() && ranks_[1].is_complete() && !ranks_[0].has_ended() && !ranks_[1].has_ended())
    ++tally.completed;
  for (const Rank& rank : ranks_) {
    tally.lost += rank.is_lost();
    tally.aborted += rank.is_aborted();
  }
  const NetworkCounters& counters = network_.counters();
  tally.packets += counters.sent;
  tally.dropped += counters.lost + counters.queue_drops + counters.corrupted;
  tally.duplicated += counters.duplicated;
  tally.happenings += happenings_;
  tally.virtual_us += network_.now_us();
  for (Rank& rank : ranks_) rank.end();
}

uint64_t World::frozen_until_us(uint32_t rank) const {
  uint64_t until_us = 0;
  for (uint32_t index = 0; index < schedule_.fault_count; ++index) {
    const Fault& fault = schedule_.faults[index];
    if (fault.kind == Fault::Kind::freeze && fault.rank == rank && network_.now_us() >= fault.from_us &&
        network_.now_us() < fault.until_us)
      until_us = std::max(until_us, fault.until_us);
  }
  return until_us;
}

void World::apply_faults() {
  for (uint32_t index = 0; index < schedule_.fault_count; ++index) {
    const Fault& fault = schedule_.faults[index];
    const uint64_t now_us = network_.now_us();
    Rank& rank = ranks_[fault.rank];
    Rank& peer = ranks_[1 - fault.rank];
    if (fault.kind == Fault::Kind::death && now_us >= fault.noticed_us && (notices_given_ >> index & 1) == 0) {
      notices_given_ |= 1u << index;
      peer.notice_peer_failed();
    }
    if (now_us < fault.from_us || (faults_applied_ >> index & 1) != 0) continue;
    if (fault.kind != Fault::Kind::death && frozen_until_us(fault.rank) != 0) continue;
    faults_applied_ |= 1u << index;
    if (fault.kind == Fault::Kind::death) rank.die();
    if (fault.kind == Fault::Kind::abort) rank.abort(FAILURE);
    if (fault.kind == Fault::Kind::close) rank.close();
  }
  if (is_late_ || network_.now_us() < schedule_.deadline_us) return;
  is_late_ = true;
  for (Rank& rank : ranks_) {
    if (rank.is_dead() || rank.has_ended() || rank.is_complete()) continue;
    require(!schedule_.must_complete, "not complete at the deadline, and nothing excuses it");
    const uint64_t excused_us = rank.last_excuse_us() + schedule_.config.peer_timeout_us + NOTICE_SLACK_US;
    require(!rank.needs_peer() || network_.now_us() < excused_us,
            "waiting or in the middle of a message for long, and the silent peer is not noticed");
    rank.abort(DEADLINE);
  }
}

void World::happen(const Happening& happening) {
  Rank& rank = ranks_[happening.rank];
  const bool is_wake = happening.packet == Network::NO_PACKET;
  if (is_wake && rank.wake_us() * 1'000 != happening.at_ns) return;  // set anew since
  if (const uint64_t frozen_us = frozen_until_us(happening.rank); frozen_us != 0) {
    // Arrivals are in the socket. The clock is read after it.
    rank.excuse();
    if (!is_wake) return network_.postpone(happening, frozen_us);
    rank.woken();
    return network_.postpone({happening.at_ns, 0, Network::SUMMONS, happening.rank}, frozen_us);
  }
  if (is_wake) {
    rank.woken();
  } else if (happening.packet != Network::SUMMONS) {
    const Packet& packet = network_.packet(happening.packet);
    if (!rank.is_dead()) rank.deliver(packet, ranks_[1 - happening.rank].order_of(packet) - packet.order);
    network_.free_packet(happening.packet);
    // A port reads a part of its socket before it does anything else.
    if (network_.has_arrivals(happening.rank, happening.at_ns + 1)) return;
  }
  // A port looks at timers only when all sockets are empty, because it may not have run since they were due.
  rank.round(!network_.has_arrivals(happening.rank, (network_.now_us() + 1) * 1'000));
}

void World::run_until_rest() {
  while (!network_.empty()) {
    require(++happenings_ <= MOST_HAPPENINGS, "it never comes to rest");
    const Happening happening = network_.next();
    require(network_.now_us() <= schedule_.deadline_us + REST_US, "no rest long after the deadline");
    apply_faults();
    happen(happening);
  }
}

void World::judge_lost(const Rank& rank, const Rank& peer) const {
  const std::string& reason = rank.end_reason();
  if (rank.is_told()) {
    // The peer's flow may have ended before its program did.
    const bool is_its_reason = reason == peer.end_reason() || reason == peer.flow_end_reason();
    return require(is_its_reason, [&] { return "no peer aborted with: " + reason; });
  }
  if (reason.starts_with("gave no sign of life ")) return;  // judged when it happened
  if (reason.starts_with("said goodbye ") || reason == "left the group")
    return require(peer.is_closed(), "a goodbye that nobody said");
  require(reason == "connection refused" && peer.is_dead(), [&] { return "lost for no fault of its peer: " + reason; });
}

void World::judge() const {
  for (uint32_t index = 0; index < 2; ++index) {
    const Rank& rank = ranks_[index];
    const Rank& peer = ranks_[1 - index];
    if (schedule_.must_complete)
      require(rank.is_complete() && !rank.has_ended(), "not complete at rest, and nothing excuses it");
    // A rank that was neither disturbed nor complete must have been told, by the deadline at the latest.
    require(rank.is_dead() || rank.has_ended() || rank.is_complete(), "at rest without an end");
    if (rank.is_lost()) judge_lost(rank, peer);
    rank.check_counters(peer);
    directions_[index].check_guards();
  }
}

std::string World::summary(const Tally& tally) {
  const auto number = [](uint64_t value) { return std::to_string(value); };
  return number(tally.completed) + " complete, " + number(tally.lost) + " peers lost, " + number(tally.aborted) +
         " aborts; " + number(tally.packets) + " packets, " + number(tally.dropped) + " dropped, " +
         number(tally.duplicated) + " duplicated, " + number(tally.virtual_us / 1'000'000) + " s of virtual time";
}

std::string World::describe() const {
  return model::describe(schedule_) + ranks_[0].describe() + "\n" + ranks_[1].describe() + "\nat " +
         std::to_string(network_.now_us()) + " us, " + std::to_string(network_.counters().sent) + " packets sent, " +
         std::to_string(happenings_) + " happenings\n";
}

}  // namespace sennit::model
