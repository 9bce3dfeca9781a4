// SPDX-License-Identifier: Apache-2.0
// How a group ends in failure: who is to blame, what each operation's error says, what the peers are told.
#include <algorithm>
#include <cstdio>

#include "executor/engine.hpp"

namespace sennit {
namespace {

// A peer that an operation waited for, and that gave no sign of life for so long before the deadline, is silent:
// stopped, cut off, or busy elsewhere. Ten beats of shared memory, five questions over a network.
constexpr uint64_t SILENT_US = 500'000;

std::string seconds(uint64_t time_us) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(time_us) / 1e6);
  return text;
}

std::string rank_list(const std::vector<uint32_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (const uint32_t rank : ranks) text.append(rank == ranks.front() ? "" : ", ").append(std::to_string(rank));
  return text;
}

}  // namespace

void Engine::check_failures(uint64_t now_us) {
  if (ended_ != SENNIT_OK) return;
  for (const Port* port : ports_) {
    const std::string reason(port->failure());
    if (reason.empty()) continue;
    fail_all(SENNIT_DEVICE, reason,
             {{config_.rank}, "rank " + std::to_string(config_.rank) + " cannot go on: " + reason});
    return;
  }
  if (const MailboxFailure* failure = mailbox_.failure()) {
    switch (failure->kind) {
      case MailboxFailure::Kind::mismatch:
        fail_all(SENNIT_MISMATCH, failure->reason, {{}, failure->reason});
        return;
      case MailboxFailure::Kind::peer_lost: {
        FailureNotice notice{{}, "rank " + std::to_string(failure->peer) + " " + failure->reason};
        for (uint32_t peer = 0; peer < config_.world; ++peer) {
          if (mailbox_.lost(peer)) notice.lost.push_back(peer);
        }
        if (notice.lost.size() > 1) notice.reason += "; lost in all: " + rank_list(notice.lost);
        fail_all(SENNIT_PEER, notice.reason + " (" + mailbox_.lane(failure->peer)->describe() + ")", notice);
        return;
      }
      case MailboxFailure::Kind::peer_aborted:
        fail_as_told(failure->peer, FailureNotice::decode(failure->reason, config_.world));
        return;
    }
  }
  next_deadline_us_ = UINT64_MAX;
  for (const Operation* operation : active_) {
    if (operation->deadline_us_ <= now_us) {
      fail_late(*operation, now_us);
      return;
    }
    next_deadline_us_ = std::min(next_deadline_us_, operation->deadline_us_);
  }
}

// The reporter is named last: the ranks to blame are what matters.
void Engine::fail_as_told(uint32_t reporter, const FailureNotice& notice) {
  const std::string who = "rank " + std::to_string(reporter);
  const bool is_blamed = std::find(notice.lost.begin(), notice.lost.end(), config_.rank) != notice.lost.end();
  std::string reason = notice.reason.empty() ? who + " ended the group" : notice.reason;
  if (is_blamed) {
    reason = "the others gave up this rank (" + std::to_string(config_.rank) + "): " + reason;
  }
  // "rank 2 aborted: ..." says itself who reports it.
  if (!reason.starts_with(who + " ")) reason += " (reported by " + who + ")";
  fail_all(SENNIT_PEER, reason, {notice.lost, notice.reason});
}

void Engine::fail_late(const Operation& operation, uint64_t now_us) {
  const uint64_t silence_us = std::min(SILENT_US, operation.timeout_us_ / 2);
  const uint64_t posted_us = operation.posted_us();
  const std::vector<uint32_t> awaited = mailbox_.awaited();
  std::vector<uint32_t> silent, silent_elsewhere;
  for (uint32_t peer = 0; peer < config_.world; ++peer) {
    const Lane* lane = mailbox_.lane(peer);
    if (lane == nullptr || std::max(lane->heard_us(), posted_us) + silence_us > now_us) continue;
    const bool is_awaited = std::binary_search(awaited.begin(), awaited.end(), peer);
    (is_awaited ? silent : silent_elsewhere).push_back(peer);
  }
  // Those that we wait for may themselves wait for a silent one.
  if (silent.empty()) silent = silent_elsewhere;
  std::string reason = operation.describe() + " did not finish on rank " + std::to_string(config_.rank) +
                       " within its deadline of " + seconds(operation.timeout_us_);
  if (!silent.empty()) reason += "; no sign of life from " + rank_list(silent) + " for " + seconds(silence_us);
  const std::string outstanding = mailbox_.describe_outstanding();
  fail_all(SENNIT_TIMEOUT, outstanding.empty() ? reason : reason + "; " + outstanding,
           {silent, silent.empty() ? reason + "; awaited: " + rank_list(awaited) : reason});
}

void Engine::fail_all(sennit_status status, const std::string& reason, const FailureNotice& notice) {
  if (ended_ != SENNIT_OK) return;
  ended_ = status;
  end_reason_ = reason;
  lost_ = notice.lost;
  mailbox_.abandon();
  const uint64_t now_us = clock_us();
  const std::string told = notice.encode();
  for (Port* port : ports_) {
    port->abort(told);
    port->progress(now_us);  // lets the last words out
  }
  while (!active_.empty()) {
    Operation* operation = active_.back();
    finish(operation, status, operation->describe() + ": " + reason);
  }
}

void Engine::abort(const std::string& reason) {
  Lock lock = enter();
  const std::string told = "rank " + std::to_string(config_.rank) + " aborted: " + reason;
  fail_all(SENNIT_ABORTED, reason, {{}, told});
  if (sleeping_) wake();
  run_callbacks(lock);
}

std::string Engine::failure() {
  Lock lock = enter();
  return ended_ == SENNIT_OK ? std::string() : end_reason_;
}

std::vector<uint32_t> Engine::lost_ranks() {
  Lock lock = enter();
  return lost_;
}

std::vector<uint32_t> Engine::find_gone_ranks() {
  Lock lock = enter();
  const uint64_t now_us = clock_us();
  std::vector<uint32_t> gone;
  for (Port* port : ports_) {
    for (const uint32_t peer : port->find_gone(now_us)) gone.push_back(peer);
  }
  std::sort(gone.begin(), gone.end());
  return gone;
}

}  // namespace sennit
