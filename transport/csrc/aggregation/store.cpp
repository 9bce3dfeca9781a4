// SPDX-License-Identifier: Apache-2.0
#include "aggregation/store.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

namespace sennit::aggregation {
namespace {

// Smaller windows do not fill a link. A job gets one only if it asks for it.
constexpr uint32_t WINDOW_MIN = 16;

struct Arithmetic {
  sennit_dtype dtype;
  uint32_t element_bytes;
};

Arithmetic arithmetic_of(uint8_t arithmetic) {
  if (arithmetic == AGGREGATION_SUM_I32) return {SENNIT_I32, 4};
  if (arithmetic == AGGREGATION_SUM_BF16) return {SENNIT_BF16, 2};
  return {SENNIT_F32, 4};
}

aggregation_verdict verdict_of(Refusal refusal) {
  switch (refusal) {
    case Refusal::truncated:
      return AGGREGATION_VERDICT_TRUNCATED;
    case Refusal::foreign:
      return AGGREGATION_VERDICT_FOREIGN;
    case Refusal::wrong_version:
      return AGGREGATION_VERDICT_WRONG_VERSION;
    case Refusal::corrupt:
      return AGGREGATION_VERDICT_CORRUPT;
    default:
      return AGGREGATION_VERDICT_MALFORMED;
  }
}

// Keeps what a program has seen of the frame, if the rank is still there.
void learn(Endpoint& known, const Endpoint& from) {
  if (known.family != from.family || known.port != from.port ||
      std::memcmp(known.address, from.address, sizeof from.address) != 0 ||
      std::memcmp(known.own_address, from.own_address, sizeof from.own_address) != 0)
    known = from;
}

uint64_t cell_count(uint32_t leaves, uint32_t window) { return uint64_t{2} * window * (leaves + 1); }

uint64_t cell_count(const aggregation_job& job) { return uint64_t{job.slots} * (job.leaves + 1u); }

// Programs hold a lock for microseconds, and cannot die with it.
void lock(aggregation_slot& slot) {
  while (!aggregation_try_lock(&slot)) {
  }
}

}  // namespace

std::byte* Answers::add(size_t size_bytes) {
  newest_ = bytes_.size();
  bytes_.resize(newest_ + size_bytes);
  return bytes_.data() + newest_;
}

void Answers::send_to(const Endpoint& to) { answers_.push_back({to, newest_, bytes_.size() - newest_}); }

Store::Store(std::span<std::byte> memory) {
  if (memory.size() < MEMORY_MIN_BYTES)
    throw std::invalid_argument("memory of " + std::to_string(memory.size()) +
                                " bytes; allowed: " + std::to_string(MEMORY_MIN_BYTES) + " or more");
  jobs_ = {reinterpret_cast<aggregation_job*>(memory.data()), AGGREGATION_JOBS_MAX};
  cells_ = {reinterpret_cast<aggregation_cell*>(memory.data() + AGGREGATION_CELLS_AT),
            std::min<size_t>((memory.size() - AGGREGATION_CELLS_AT) / AGGREGATION_CELL_BYTES, UINT32_MAX)};
}

aggregation_verdict Store::take(std::span<const std::byte> datagram, const Endpoint& from, Answers& answers) {
  const aggregation_verdict verdict = judge(datagram, from, answers);
  ++reinterpret_cast<uint64_t*>(&counters_)[verdict];
  counters_.received_bytes += datagram.size();
  return verdict;
}

aggregation_verdict Store::judge(std::span<const std::byte> datagram, const Endpoint& from, Answers& answers) {
  Header header;
  if (const Refusal refusal = read_packet(datagram, header); refusal != Refusal::none) return verdict_of(refusal);
  const std::byte* stripes = datagram.data() + HEADER_BYTES;
  switch (header.kind) {
    case AGGREGATION_LEAF:
      return take_leaf(header, stripes, from, answers);
    case AGGREGATION_JOIN:
      return take_join(header, stripes, from, answers);
    case AGGREGATION_LEAVE:
      return take_leave(header);
    default:
      return AGGREGATION_VERDICT_UNEXPECTED;
  }
}

aggregation_verdict Store::take_leaf(const Header& header, const std::byte* elements, const Endpoint& from,
                                     Answers& answers) {
  if (header.stripes == 0) return AGGREGATION_VERDICT_MALFORMED;
  aggregation_job* job = find(header);
  if (job == nullptr) return refuse(header, AGGREGATION_UNKNOWN_JOB, from, answers);
  if (header.leaf >= job->leaves) return AGGREGATION_VERDICT_MALFORMED;
  job->is_touched = 1;
  learn(job->ranks[header.leaf], from);
  aggregation_cell* cells = &cells_[aggregation_cell_of(job->first_cell, job->slots, job->leaves, header.block)];
  aggregation_slot& slot = cells->head;
  lock(slot);
  aggregation_verdict verdict =
      aggregation_judge(&slot, header.block, header.mark, header.arithmetic, header.stripes, header.leaf);
  if (verdict == AGGREGATION_VERDICT_STORED || verdict == AGGREGATION_VERDICT_REPEATED) {
    std::memcpy(cells[1 + header.leaf].elements, elements, size_t{AGGREGATION_STRIPE_BYTES} * header.stripes);
    verdict = aggregation_note(&slot, header.leaf, job->leaves, verdict);
    if (verdict == AGGREGATION_VERDICT_COMPLETED) {
      sum(*job, cells);
      slot.state = AGGREGATION_SUMMED;
    }
  }
  // A program may have made the sum, and left the answers to the store.
  if (verdict == AGGREGATION_VERDICT_REPEATED_LATE && slot.state == AGGREGATION_SUMMED)
    verdict = AGGREGATION_VERDICT_COMPLETED;
  if (verdict == AGGREGATION_VERDICT_COMPLETED) {
    slot.state = AGGREGATION_ANSWERED;
    add_result(header, *cells, answers);
    for (const Endpoint& rank : std::span(job->ranks).first(job->leaves)) answers.send_to(rank);
  } else if (verdict == AGGREGATION_VERDICT_REPEATED_LATE) {
    add_result(header, *cells, answers);
    answers.send_to(from);
  }
  aggregation_unlock(&slot);
  if (verdict == AGGREGATION_VERDICT_REPEATED) {
    Header waiting = header;
    waiting.kind = AGGREGATION_WAITING;
    waiting.stripes = 0;
    write_header(answers.add(HEADER_BYTES), waiting);
    answers.send_to(from);
  }
  if (verdict == AGGREGATION_VERDICT_OTHER_PLAN) return refuse(header, AGGREGATION_OTHER_PLAN, from, answers);
  return verdict;
}

void Store::add_result(const Header& header, aggregation_cell& cell, Answers& answers) const {
  Header result = header;
  result.kind = AGGREGATION_RESULT;
  std::byte* packet = answers.add(result.packet_bytes());
  std::memcpy(packet + HEADER_BYTES, cell.elements, size_t{AGGREGATION_STRIPE_BYTES} * header.stripes);
  write_header(packet, result);
}

// The canonical tree (docs/reference/plans.md), as a binary counter.
void Store::sum(aggregation_job& job, aggregation_cell* cells) const {
  std::array<FoldSource, AGGREGATION_LEAVES_MAX> sources;
  for (uint32_t leaf = 0; leaf < job.leaves; ++leaf) {
    const int combinations = leaf + 1u == job.leaves ? std::popcount(leaf) : std::countr_one(leaf);
    sources[leaf] = {cells[1 + leaf].elements, static_cast<uint32_t>(combinations), false};
  }
  const Arithmetic arithmetic = arithmetic_of(cells->head.arithmetic);
  find_fold(arithmetic.dtype,
            SENNIT_SUM)({.destination = cells->elements,
                         .sources = std::span(sources).first(job.leaves),
                         .count = uint64_t{AGGREGATION_STRIPE_BYTES} * cells->head.stripes / arithmetic.element_bytes,
                         .divisor = 1,
                         .scalar = 1,
                         .gives_partial = false});
}

aggregation_verdict Store::take_join(const Header& header, const std::byte* stripe, const Endpoint& from,
                                     Answers& answers) {
  if (header.stripes != 1) return AGGREGATION_VERDICT_MALFORMED;
  const uint32_t leaves = wire::load_be16(stripe + offsetof(aggregation_join, leaves));
  const uint32_t window = std::bit_floor(
      std::min<uint32_t>(wire::load_be16(stripe + offsetof(aggregation_join, window)), AGGREGATION_WINDOW_MAX));
  if (leaves < 2 || leaves > AGGREGATION_LEAVES_MAX || header.leaf >= leaves || window == 0)
    return AGGREGATION_VERDICT_MALFORMED;
  aggregation_job* job = find_key(header.key);
  if (job != nullptr && job->leaves != leaves) return refuse(header, AGGREGATION_OTHER_JOB, from, answers);
  if (job == nullptr) job = make(header.key, leaves, window);
  if (job == nullptr) return refuse(header, AGGREGATION_NO_ROOM, from, answers);
  job->is_touched = 1;
  learn(job->ranks[header.leaf], from);
  private_of(*job).left &= ~(uint64_t{1} << header.leaf);
  Header joined = header;
  joined.kind = AGGREGATION_JOINED;
  joined.job = job->number;
  std::byte* packet = answers.add(joined.packet_bytes());
  std::memcpy(packet + HEADER_BYTES, stripe, AGGREGATION_STRIPE_BYTES);
  wire::store_be16(packet + HEADER_BYTES + offsetof(aggregation_join, window), static_cast<uint16_t>(job->slots / 2));
  write_header(packet, joined);
  answers.send_to(from);
  return AGGREGATION_VERDICT_JOINED;
}

aggregation_verdict Store::take_leave(const Header& header) {
  aggregation_job* job = find(header);
  // Not answered: it would be longer than what came, and a forged address would get it.
  if (job == nullptr) return AGGREGATION_VERDICT_UNKNOWN_JOB;
  if (header.stripes != 0 || header.leaf >= job->leaves) return AGGREGATION_VERDICT_MALFORMED;
  // Others may still lack a result. If their notices are lost, the job ends as idle.
  uint64_t& left = private_of(*job).left;
  left |= uint64_t{1} << header.leaf;
  if (left == ~uint64_t{0} >> (64 - job->leaves)) remove(*job);
  return AGGREGATION_VERDICT_LEFT;
}

aggregation_verdict Store::refuse(const Header& header, aggregation_reason reason, const Endpoint& from,
                                  Answers& answers) {
  if (refusals_ < REFUSALS_MAX) {
    ++refusals_;
    Header refused = header;
    refused.kind = AGGREGATION_REFUSED;
    refused.stripes = 1;
    std::byte* packet = answers.add(refused.packet_bytes());
    wire::store_be16(packet + HEADER_BYTES + offsetof(aggregation_refusal, reason), reason);
    write_header(packet, refused);
    answers.send_to(from);
  }
  switch (reason) {
    case AGGREGATION_NO_ROOM:
      return AGGREGATION_VERDICT_NO_ROOM;
    case AGGREGATION_OTHER_PLAN:
      return AGGREGATION_VERDICT_OTHER_PLAN;
    case AGGREGATION_OTHER_JOB:
      return AGGREGATION_VERDICT_OTHER_JOB;
    default:
      return AGGREGATION_VERDICT_UNKNOWN_JOB;
  }
}

aggregation_job* Store::find(const Header& header) {
  aggregation_job& job = jobs_[header.job % AGGREGATION_JOBS_MAX];
  return job.number != 0 && job.number == header.job && job.key == header.key ? &job : nullptr;
}

aggregation_job* Store::find_key(uint64_t key) {
  const auto found = std::ranges::find_if(jobs_, [key](const auto& job) { return job.number != 0 && job.key == key; });
  return found == jobs_.end() ? nullptr : &*found;
}

aggregation_job* Store::make(uint64_t key, uint32_t leaves, uint32_t window) {
  const auto free_place = [this] { return std::ranges::find(jobs_, 0u, &aggregation_job::number); };
  std::optional<uint32_t> room;
  // Idle jobs go first, then the window shrinks.
  while (free_place() == jobs_.end() || !(room = room_for(cell_count(leaves, window))))
    if (!remove_idlest()) break;
  if (free_place() == jobs_.end()) return nullptr;
  while (!room && window > WINDOW_MIN) room = room_for(cell_count(leaves, window /= 2));
  if (!room) return nullptr;
  for (uint64_t n = 0; n < uint64_t{2} * window; ++n) {
    aggregation_slot& slot = cells_[*room + n * (leaves + 1)].head;
    lock(slot);
    slot.leaves = 0;
    slot.block = 0;
    aggregation_unlock(&slot);
  }
  aggregation_job& job = *free_place();
  const auto place = static_cast<uint32_t>(&job - jobs_.data());
  generation_ = generation_ % (UINT32_MAX / AGGREGATION_JOBS_MAX) + 1;
  job.key = key;
  job.first_cell = *room;
  job.leaves = static_cast<uint16_t>(leaves);
  job.slots = static_cast<uint16_t>(2 * window);
  std::ranges::fill(job.ranks, Endpoint{});
  private_[place] = {};
  __atomic_store_n(&job.number, generation_ * AGGREGATION_JOBS_MAX + place, __ATOMIC_RELEASE);
  return &job;
}

// The first gap between jobs.
std::optional<uint32_t> Store::room_for(uint64_t cells) const {
  uint64_t at = 0;
  while (at + cells <= cells_.size()) {
    const auto in_the_way = std::ranges::find_if(jobs_, [&](const aggregation_job& job) {
      return job.number != 0 && job.first_cell < at + cells && at < job.first_cell + cell_count(job);
    });
    if (in_the_way == jobs_.end()) return static_cast<uint32_t>(at);
    at = in_the_way->first_cell + cell_count(*in_the_way);
  }
  return std::nullopt;
}

bool Store::remove_idlest() {
  aggregation_job* idlest = nullptr;
  for (aggregation_job& job : jobs_) {
    if (job.number == 0 || job.is_touched || private_of(job).idle_s < IDLE_S) continue;
    if (idlest == nullptr || private_of(job).idle_s > private_of(*idlest).idle_s) idlest = &job;
  }
  if (idlest == nullptr) return false;
  remove(*idlest);
  return true;
}

void Store::remove(aggregation_job& job) {
  __atomic_store_n(&job.number, 0, __ATOMIC_SEQ_CST);
  // A program that took a slot before that has left it when this gets the lock. One that takes it later sees that the
  // job has gone.
  for (uint32_t n = 0; n < job.slots; ++n) {
    aggregation_slot& slot = cells_[job.first_cell + uint64_t{n} * (job.leaves + 1u)].head;
    lock(slot);
    aggregation_unlock(&slot);
  }
}

void Store::second_passed() {
  refusals_ = 0;
  for (aggregation_job& job : jobs_) {
    if (job.number == 0) continue;
    uint32_t& idle_s = private_of(job).idle_s;
    idle_s = __atomic_exchange_n(&job.is_touched, 0, __ATOMIC_RELAXED) != 0 ? 0 : idle_s + 1;
  }
}

std::vector<Store::Job> Store::jobs() const {
  std::vector<Job> found;
  for (size_t n = 0; n < jobs_.size(); ++n)
    if (const aggregation_job& job = jobs_[n]; job.number != 0)
      found.push_back({job.number, job.leaves, job.slots / 2u, private_[n].idle_s, slots_open(job)});
  return found;
}

// Without the slots' locks: a program may be at the work, and the number is for people.
uint32_t Store::slots_open(const aggregation_job& job) const {
  uint32_t found = 0;
  for (uint32_t block = 0; block < job.slots; ++block) {
    const aggregation_slot& slot = cells_[aggregation_cell_of(job.first_cell, job.slots, job.leaves, block)].head;
    found += AGGREGATION_LOAD(slot.leaves) != 0 && AGGREGATION_LOAD(slot.state) == AGGREGATION_OPEN;
  }
  return found;
}

}  // namespace sennit::aggregation
