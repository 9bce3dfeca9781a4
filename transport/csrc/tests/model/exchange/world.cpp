// SPDX-License-Identifier: Apache-2.0
#include "model/exchange/world.hpp"

#include <algorithm>

#include "model/violation.hpp"

namespace sennit::model::exchange {
namespace {

constexpr uint64_t MEMORY_BYTES = 1 << 20;
// Nothing moved for so many turns of each rank: time passes.
constexpr uint32_t STILL_TURNS = 12;
constexpr uint64_t STILL_STEP_US = 20'000;
// Then only what waits for a silent peer may still happen. It is given up within two timeouts.
constexpr uint64_t STILL_LIMIT_US = 3 * PEER_TIMEOUT_US;
// Of each wait. A rank that asks another one again and again is never still.
constexpr uint64_t DEADLINE_US = 10 * PEER_TIMEOUT_US;
constexpr uint32_t TURNS_MAX = 200'000;

}  // namespace

World::Tally& World::Tally::operator+=(const Tally& other) {
  schedules += other.schedules;
  done += other.done;
  failed += other.failed;
  told += other.told;
  messages += other.messages;
  return *this;
}

std::string World::summary(const Tally& tally) {
  return std::to_string(tally.messages) + " messages; " + std::to_string(tally.done) + " ranks done, " +
         std::to_string(tally.failed) + " failed, " + std::to_string(tally.told) + " of them told of an abort";
}

World::World() : heap_(static_cast<std::byte*>(SharedHeap::allocate(MEMORY_BYTES))), plain_(MEMORY_BYTES) {
  require(heap_ != nullptr, "no shared heap");
}

World::~World() { SharedHeap::free(heap_); }

void World::run(uint64_t seed, bool is_verbose, Tally& tally) {
  has_fault_ = false;
  ranks_.clear();
  draw(seed, schedule_);
  network_.begin(schedule_);
  for (uint32_t rank = 0; rank < schedule_.world; ++rank)
    ranks_.push_back(std::make_unique<Rank>(schedule_, rank, network_, is_verbose));
  for (uint32_t rank = 0; rank < schedule_.world; ++rank)
    for (uint32_t peer = 0; peer < schedule_.world; ++peer)
      if (peer != rank) ranks_[rank]->meet(*ranks_[peer]);
  give_memory();
  SimRandom random(seed ^ 0x5151);
  run_until_rest(random);
  judge(tally);
}

void World::give_memory() {
  uint64_t heap_at = 0, plain_at = 0;
  const auto take = [&](uint32_t size_bytes, bool is_in_heap) {
    uint64_t& at = is_in_heap ? heap_at : plain_at;
    std::byte* const data = (is_in_heap ? heap_ : plain_.data()) + at;
    at += (size_bytes + 127) / 64 * 64;
    require(at <= MEMORY_BYTES, "the model's memory is too small");
    return data;
  };
  for (uint32_t number = 0; number < schedule_.messages.size(); ++number) {
    const Message& message = schedule_.messages[number];
    ranks_[message.from]->set_memory(number, false, take(message.size_bytes, message.is_from_heap));
    if (!message.is_loan) ranks_[message.to]->set_memory(number, true, take(message.size_bytes, message.is_to_heap));
  }
  for (const auto& rank : ranks_) rank->begin();
}

bool World::may_run(uint32_t rank, uint32_t turn) const {
  const Fault& fault = schedule_.fault;
  if (ranks_[rank]->has_ended() || ranks_[rank]->is_frozen()) return false;
  return fault.kind != Fault::Kind::pause || fault.rank != rank || turn < fault.at_turn ||
         turn >= fault.at_turn + fault.turns;
}

void World::apply_fault(uint32_t turn) {
  const Fault& fault = schedule_.fault;
  Rank& rank = *ranks_[fault.rank];
  if (has_fault_ || turn < fault.at_turn || rank.has_ended()) return;
  has_fault_ = fault.kind >= Fault::Kind::freeze;
  if (fault.kind == Fault::Kind::freeze) rank.freeze();
  if (fault.kind == Fault::Kind::abort) rank.abort();
  if (fault.kind == Fault::Kind::leave) rank.leave();
}

// Without a fault nothing is left over either: no record, block, reference, loan or credit.
bool World::are_all_at_rest() const {
  return std::ranges::all_of(ranks_, [this](const auto& rank) {
    return rank->has_ended() || rank->is_frozen() || (rank->is_done() && (has_fault_ || rank->is_settled()));
  });
}

// Who waits for any rank waits for its deadline where one of them ended and another one is there.
bool World::end_at_deadline() {
  const auto late = std::ranges::find_if(ranks_, [](const auto& rank) {
    return !rank->has_ended() && !rank->is_frozen() && !rank->is_done() && rank->awaits_any();
  });
  if (!has_fault_ || late == ranks_.end()) return false;
  (*late)->abort();
  return true;
}

void World::run_until_rest(SimRandom& random) {
  uint64_t now_us = 1'000'000, still_us = 0;
  uint32_t still_turns = 0;
  for (uint32_t turn = 0; !are_all_at_rest(); ++turn) {
    require(turn < TURNS_MAX, "it never comes to rest");
    apply_fault(turn);
    const auto rank = static_cast<uint32_t>(random.below(schedule_.world));
    now_us += random.below(20);
    if (ranks_[rank]->has_ended()) ranks_[rank]->answer(now_us);
    if (!may_run(rank, turn)) continue;
    if (ranks_[rank]->turn(now_us, static_cast<uint32_t>(random.below(4)))) {
      still_turns = 0;
      still_us = 0;
    } else if (++still_turns > STILL_TURNS * schedule_.world) {
      still_turns = 0;
      still_us += STILL_STEP_US;
      now_us += STILL_STEP_US;
      if (now_us > DEADLINE_US) end_at_deadline();
      if (still_us < STILL_LIMIT_US) continue;
      if (!end_at_deadline()) return;
      still_us = 0;
    }
  }
}

void World::judge(Tally& tally) {
  for (const auto& rank : ranks_) {
    if (!rank->is_frozen()) rank->judge();
    require(has_fault_ || !rank->has_failed(), [&] { return "a rank failed though none ended: " + rank->failure(); });
    require(rank->has_ended() || rank->is_frozen() || rank->is_done(), "a rank waits for ever");
    require(has_fault_ || rank->is_settled(), "all messages are complete, but something is left over in a lane");
    tally.done += rank->is_done();
    tally.failed += rank->has_failed();
    tally.told += rank->was_told_of_abort();
  }
  ++tally.schedules;
  tally.messages += schedule_.messages.size();
}

std::string World::describe() const {
  std::string text = exchange::describe(schedule_);
  for (const auto& rank : ranks_) text += rank->describe();
  return text;
}

}  // namespace sennit::model::exchange
