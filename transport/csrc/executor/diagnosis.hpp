// SPDX-License-Identifier: Apache-2.0
// What a failure of the group means: which ranks are to blame, and what the errors here and at the peers say.
//
// It looks and writes texts. The engine acts on them (Engine::end). Memory may be short when a group ends, so what is
// marked noexcept has a text for that too.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "messages/failure.hpp"
#include "messages/mailbox.hpp"
#include "sennit/core.h"

namespace sennit {

class Operation;

// How a group ends.
struct GroupEnd {
  sennit_status status;
  std::string reason;         // for errors of this rank
  FailureNotice notice{};     // for the peers. The ranks in it are to blame.
  bool says_goodbye = false;  // in place of the notice

  // The error of an operation that the end cuts off.
  std::string error_of(const Operation& operation) const noexcept;
};

// The peers for which operations wait at a deadline, and those of them that have given no sign of life. Ascending.
struct Suspects {
  std::vector<uint32_t> awaited, silent;
};

class Diagnosis {
 public:
  Diagnosis(uint32_t rank, uint32_t world, uint64_t peer_timeout_us, Mailbox& mailbox)
      : rank_(rank), world_(world), peer_timeout_us_(peer_timeout_us), mailbox_(mailbox) {}

  // A port cannot go on.
  GroupEnd of_port(std::string_view failure) const;
  GroupEnd of_mailbox(const MailboxFailure& failure) const;

  // At the deadline of an operation.
  Suspects find_suspects(uint64_t posted_us, uint64_t timeout_us, uint64_t now_us) const;
  // How much longer than its timeout the operation may take, because another rank may know who is silent.
  uint64_t extension_us(const Suspects& suspects, uint64_t timeout_us) const;
  // `operation`: its description. `obstacle`: what holds it up on this rank; empty: nothing does.
  GroupEnd late(const std::string& operation, uint64_t timeout_us, const std::string& obstacle,
                const Suspects& suspects) const;

  // This rank aborts, with its user's reason.
  GroupEnd aborted(std::string_view reason) const noexcept;
  GroupEnd shut_down() const noexcept;
  // Within an exception handler: the exception has left the group's state in doubt.
  GroupEnd in_doubt() const noexcept;

 private:
  FailureNotice own_fault(std::string_view reason) const;
  GroupEnd as_told(uint32_t reporter, const FailureNotice& notice) const;
  bool is_as_good_as_lost(uint32_t peer) const;

  const uint32_t rank_;
  const uint32_t world_;
  const uint64_t peer_timeout_us_;
  Mailbox& mailbox_;
};

}  // namespace sennit
