// SPDX-License-Identifier: Apache-2.0
#include "executor/diagnosis.hpp"

#include <algorithm>
#include <cstdio>
#include <new>
#include <utility>

#include "executor/operation.hpp"

namespace sennit {
namespace {

// A peer that an operation waited for counts as silent (stopped or cut off) if it gave no sign of life for this long
// before the deadline. In this time it gets two questions over a network, or misses two beats in shared memory.
constexpr uint64_t SILENT_US = 500'000;

// A rank at its deadline that heard from all peers that it waits for gives the others this long: in an algorithm where
// each rank waits for few, another one may know who is silent.
constexpr uint64_t WORD_US = 200'000;

// Short enough for a std::string without allocation, like all texts that are used when memory is short.
constexpr const char* OUT_OF_MEMORY = "out of memory";

constexpr const char* TIMED_OUT = " timed out";

uint64_t silence_limit_us(uint64_t timeout_us) { return std::min(SILENT_US, timeout_us / 2); }

std::string seconds(uint64_t time_us) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(time_us) / 1e6);
  return text;
}

std::string rank_name(uint32_t rank) { return "rank " + std::to_string(rank); }

std::string rank_list(const std::vector<uint32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (const uint32_t rank : ranks) text.append(rank == ranks.front() ? "" : ", ").append(std::to_string(rank));
  return text;
}

}  // namespace

std::string GroupEnd::error_of(const Operation& operation) const noexcept {
  try {
    const std::string name = operation.describe();
    // The reason of the operation that was late begins with its name.
    return reason.starts_with(name + TIMED_OUT) ? reason : name + ": " + reason;
  } catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
  }
}

FailureNotice Diagnosis::own_fault(std::string_view reason) const {
  return {{rank_}, rank_name(rank_) + " cannot go on: " + std::string(reason)};
}

GroupEnd Diagnosis::of_port(std::string_view failure) const {
  return {SENNIT_DEVICE, std::string(failure), own_fault(failure)};
}

GroupEnd Diagnosis::of_mailbox(const MailboxFailure& failure) const {
  if (failure.kind == MailboxFailure::Kind::mismatch) return {SENNIT_MISMATCH, failure.reason, {{}, failure.reason}};
  if (failure.kind == MailboxFailure::Kind::peer_aborted)
    return as_told(failure.peer, FailureNotice::decode(failure.reason, world_));
  FailureNotice notice{{}, rank_name(failure.peer) + " " + failure.reason};
  for (uint32_t peer = 0; peer < world_; ++peer) {
    if (mailbox_.lost(peer) || is_as_good_as_lost(peer)) notice.lost.push_back(peer);
  }
  if (notice.lost.size() > 1) notice.reason += "; lost in all: " + rank_list(notice.lost);
  notice.reason += " (" + mailbox_.lane(failure.peer)->describe() + ")";
  return {SENNIT_PEER, notice.reason, notice};
}

// Whether the peer has been silent almost as long as the rank just lost. Ranks of one host fall silent together.
bool Diagnosis::is_as_good_as_lost(uint32_t peer) const {
  const Lane* const lane = mailbox_.lane(peer);
  return lane != nullptr && lane->silent_us() >= peer_timeout_us_ - peer_timeout_us_ / 8;
}

// The reporter is named last, because the ranks to blame matter most.
GroupEnd Diagnosis::as_told(uint32_t reporter, const FailureNotice& notice) const {
  const std::string who = rank_name(reporter);
  const bool is_blamed = std::find(notice.lost.begin(), notice.lost.end(), rank_) != notice.lost.end();
  std::string reason = notice.reason.empty() ? who + " ended the group" : notice.reason;
  if (is_blamed) reason = "the others gave up this rank (" + std::to_string(rank_) + "): " + reason;
  // "rank 2 aborted: ..." already names the reporter.
  if (!reason.starts_with(who + " ")) reason += " (reported by " + who + ")";
  return {SENNIT_PEER, std::move(reason), notice};
}

// Nothing is known of ranks that are not awaited, because nobody asked them.
Suspects Diagnosis::find_suspects(uint64_t posted_us, uint64_t timeout_us, uint64_t now_us) const {
  Suspects found{mailbox_.awaited(), {}};
  for (const uint32_t peer : found.awaited) {
    const Lane* const lane = mailbox_.lane(peer);
    const uint64_t since_us = lane == nullptr ? now_us : std::max(lane->heard_us(), posted_us);
    if (since_us + silence_limit_us(timeout_us) <= now_us) found.silent.push_back(peer);
  }
  return found;
}

uint64_t Diagnosis::extension_us(const Suspects& suspects, uint64_t timeout_us) const {
  const size_t awaited = suspects.awaited.size();
  const bool others_may_know = suspects.silent.empty() && awaited != 0 && awaited + 1 < world_;
  return others_may_know ? std::min(WORD_US, timeout_us / 2) : 0;
}

GroupEnd Diagnosis::late(const std::string& operation, uint64_t timeout_us, const std::string& obstacle,
                         const Suspects& suspects) const {
  const std::vector<uint32_t>& silent = suspects.silent;
  std::string reason =
      operation + TIMED_OUT + " on " + rank_name(rank_) + ": not finished within its timeout of " + seconds(timeout_us);
  if (!obstacle.empty()) reason += "; it waits for " + obstacle;
  if (!silent.empty())
    reason += "; no sign of life from " + rank_list(silent) + " for " + seconds(silence_limit_us(timeout_us));
  FailureNotice notice{silent, silent.empty() ? reason + "; awaited: " + rank_list(suspects.awaited) : reason};
  if (const std::string outstanding = mailbox_.describe_outstanding(); !outstanding.empty())
    reason += "; " + outstanding;
  return {SENNIT_TIMEOUT, std::move(reason), std::move(notice)};
}

GroupEnd Diagnosis::aborted(std::string_view reason) const noexcept {
  GroupEnd end{SENNIT_ABORTED, OUT_OF_MEMORY};
  try {
    end.reason = reason;
    end.notice.reason = rank_name(rank_) + " aborted: " + end.reason;
  } catch (const std::bad_alloc&) {
  }
  return end;
}

GroupEnd Diagnosis::shut_down() const noexcept {
  GroupEnd end{.status = SENNIT_ABORTED, .reason = OUT_OF_MEMORY, .says_goodbye = true};
  try {
    end.reason = "the communicator was shut down";
  } catch (const std::bad_alloc&) {
  }
  return end;
}

GroupEnd Diagnosis::in_doubt() const noexcept {
  GroupEnd end{SENNIT_DEVICE, OUT_OF_MEMORY};
  try {
    try {
      throw;
    } catch (const std::bad_alloc&) {
    } catch (const std::exception& error) {
      end.reason = error.what();
    } catch (...) {
      end.reason = "unknown error";
    }
    end.notice = own_fault(end.reason);
  } catch (...) {
    end.reason = OUT_OF_MEMORY;
  }
  return end;
}

}  // namespace sennit
