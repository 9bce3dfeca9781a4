// SPDX-License-Identifier: Apache-2.0
// What runs operations: the engine of a group, or a rank of the testbed's simulator.
#pragma once

#include <cstdint>

#include "executor/team.hpp"
#include "messages/mailbox.hpp"

namespace sennit {

class Operation;

class OperationHost {
 public:
  OperationHost(uint32_t rank, uint32_t world, uint32_t threads, uint64_t spin_us)
      : mailbox_(rank, world), team_(threads, spin_us) {}
  OperationHost(const OperationHost&) = delete;
  OperationHost& operator=(const OperationHost&) = delete;

  Mailbox& mailbox() { return mailbox_; }
  ThreadTeam& team() { return team_; }
  // False: the operation's send must wait for another one of the same tag to the same peer.
  virtual bool may_send(const Operation& operation) const = 0;
  // An operation holds a reference as long as it lives.
  virtual void retain() = 0;
  virtual void release() = 0;

 protected:
  ~OperationHost() = default;

  Mailbox mailbox_;
  ThreadTeam team_;
};

}  // namespace sennit
