// SPDX-License-Identifier: Apache-2.0
// Store: what an aggregator does with a datagram, and what it answers. It has no clock, socket or thread.
//
// Its memory may be an arena that an XDP program works in at the same time (ebpf/include/aggregation_slots.h). Jobs are
// made and removed by the store alone.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "../../../ebpf/include/aggregation_slots.h"
#include "aggregation/wire.hpp"
#include "reduce/fold.hpp"

namespace sennit::aggregation {

using Endpoint = aggregation_endpoint;
static_assert(sizeof(Endpoint) == 64 && sizeof(aggregation_slot) == 64);
static_assert(sizeof(aggregation_cell) == AGGREGATION_CELL_BYTES && sizeof(aggregation_job) % 64 == 32);

// Datagrams to send, in order. Copies of one datagram share its bytes.
class Answers {
 public:
  struct Answer {
    Endpoint to;
    size_t at, size_bytes;
  };
  void clear() {
    bytes_.clear();
    answers_.clear();
  }
  // Room for a datagram. Valid until the next one.
  std::byte* add(size_t size_bytes);
  void send_to(const Endpoint& to);  // the newest datagram
  std::span<const Answer> all() const { return answers_; }
  std::span<const std::byte> bytes_of(const Answer& answer) const {
    return std::span(bytes_).subspan(answer.at, answer.size_bytes);
  }

 private:
  std::vector<std::byte> bytes_;
  size_t newest_ = 0;
  std::vector<Answer> answers_;
};

class Store {
 public:
  // Zeroed memory, at a multiple of 64. Throws std::invalid_argument if it is too small for a job.
  explicit Store(std::span<std::byte> memory);

  // Appends the answers to a datagram. Nothing in it can do harm.
  aggregation_verdict take(std::span<const std::byte> datagram, const Endpoint& from, Answers& answers);

  // To be called once a second. Jobs without packets for `IDLE_S` make room when another job needs it.
  void second_passed();
  static constexpr uint32_t IDLE_S = 10;
  // Refusals that are sent in a second. More come from a flood alone, and would answer forged addresses.
  static constexpr uint32_t REFUSALS_MAX = 10'000;

  // Of this store, without what a program did in its memory.
  const aggregation_counters& counters() const { return counters_; }
  aggregation_counters& counters() { return counters_; }

  struct Job {
    uint32_t number, leaves, window, idle_s;
    uint32_t slots_open;  // that have leaves, not all
  };
  std::vector<Job> jobs() const;

  // The least memory in which a job of 64 leaves finds room.
  static constexpr size_t MEMORY_MIN_BYTES = 4 << 20;

 private:
  struct Private {
    uint32_t idle_s = 0;
    uint64_t left = 0;  // bit r: rank r has left
  };

  aggregation_verdict judge(std::span<const std::byte> datagram, const Endpoint& from, Answers& answers);
  aggregation_verdict take_leaf(const Header& header, const std::byte* elements, const Endpoint& from,
                                Answers& answers);
  aggregation_verdict take_join(const Header& header, const std::byte* stripe, const Endpoint& from, Answers& answers);
  aggregation_verdict take_leave(const Header& header);
  aggregation_verdict refuse(const Header& header, aggregation_reason reason, const Endpoint& from, Answers& answers);
  void add_result(const Header& header, aggregation_cell& cell, Answers& answers) const;
  void sum(aggregation_job& job, aggregation_cell* cells) const;

  uint32_t slots_open(const aggregation_job& job) const;
  aggregation_job* find(const Header& header);
  aggregation_job* find_key(uint64_t key);
  aggregation_job* make(uint64_t key, uint32_t leaves, uint32_t window);
  std::optional<uint32_t> room_for(uint64_t cells) const;
  // Whether there was an idle job.
  bool remove_idlest();
  void remove(aggregation_job& job);
  Private& private_of(const aggregation_job& job) { return private_[static_cast<size_t>(&job - jobs_.data())]; }

  std::span<aggregation_job> jobs_;
  std::span<aggregation_cell> cells_;
  std::array<Private, AGGREGATION_JOBS_MAX> private_{};
  uint32_t generation_ = 0;
  uint32_t refusals_ = 0;  // in this second
  aggregation_counters counters_{};
};

}  // namespace sennit::aggregation
