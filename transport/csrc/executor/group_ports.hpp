// SPDX-License-Identifier: Apache-2.0
// The ports of one group: opened, tried and connected in its set-up. Then they are a list that the engine drives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "messages/failure.hpp"
#include "messages/mailbox.hpp"
#include "ports/aggregator_port.hpp"
#include "ports/shm/shm_port.hpp"
#include "ports/udp/udp_port.hpp"
#include "ports/verbs/device_port.hpp"
#include "telemetry/counter_page.hpp"

namespace sennit {

struct Route {
  enum class Kind { self, shm, udp, verbs } kind;  // verbs: the peer may use udp or verbs
  std::vector<std::byte> info;                     // udp, verbs: the peer's local_info, and its info_for this rank
};

class GroupPorts {
 public:
  // Lanes deliver into `mailbox`. Ports count in `counter_page`.
  GroupPorts(uint32_t rank, uint32_t world, uint64_t peer_timeout_us, CounterPage& counter_page, Mailbox& mailbox)
      : rank_(rank), world_(world), peer_timeout_us_(peer_timeout_us), counter_page_(counter_page), mailbox_(mailbox) {}
  GroupPorts(const GroupPorts&) = delete;
  GroupPorts& operator=(const GroupPorts&) = delete;

  // Set-up calls, in this order, before any operation. They throw on failure.
  // `ranks_here`: see ShmPort.
  std::vector<std::byte> shm_offer(std::span<const uint32_t> ranks_here = {});
  bool shm_accept(uint32_t peer, std::span<const std::byte> offer, std::string* why = nullptr);
  // Why the segment that was offered has no name in /dev/shm; empty if it has one, or if there is none.
  std::string shm_why_unnamed() const { return shm_ ? shm_->why_unnamed() : ""; }
  std::vector<std::byte> udp_open(const UdpConfig& config);
  std::vector<std::byte> verbs_open(const VerbsConfig& config);
  // Asks an aggregator to take the group, for at most `limit_us`. Returns why it does not; empty: it has.
  std::string aggregator_open(const wire::Endpoint& aggregator, const aggregation::ClientConfig& config,
                              uint64_t limit_us);
  // Another rank has no aggregator, so this group has none.
  void aggregator_drop();
  // The part of the network's offer for one peer. A route's info is both parts, the peer's for this rank last.
  std::vector<std::byte> offer_for(uint32_t peer) const;
  // Optional, between the last open and connect: sends packets over every path to peers on a network (ports/trial.hpp).
  void begin_trial(const std::vector<Route>& routes);
  // Runs the trial for at most `limit_us`. True when there is nothing more to find out.
  bool try_network(uint64_t limit_us);
  // Tells the reachable peers why there will be no group. Replaces connect.
  void give_up(const std::string& reason);
  // A peer that is not tried has no trial (null) and no paths.
  Trial* trial(uint32_t peer);
  std::vector<TriedPath> tried_paths(uint32_t peer) const;
  // Called by Engine::connect, which then answers peers.
  void connect(const std::vector<Route>& routes);

  // The connected ports.
  auto begin() const { return connected_.begin(); }
  auto end() const { return connected_.end(); }
  bool empty() const { return connected_.empty(); }
  bool has_network() const { return udp_ || verbs_ || aggregator_; }
  // Null if the group has none.
  AggregatorPort* aggregator() const { return aggregator_.get(); }
  // Null if no peer is reached over shared memory.
  ShmPort* shm() const { return shm_ && shm_->lane_count() != 0 ? shm_.get() : nullptr; }

  // Memory that a device may register: see DevicePort.
  void borrow(const void* data, uint64_t size_bytes);
  void give_back(const void* data, uint64_t size_bytes);
  // The same for all memory that `owner` visits (Operation::for_each_memory). Borrows all of it, or none.
  template <class Owner>
  void borrow_all(const Owner& owner) {
    if (!verbs_) return;
    size_t borrowed = 0, given_back = 0;
    try {
      owner.for_each_memory([&](const void* data, uint64_t size_bytes) {
        verbs_->borrow(data, size_bytes);
        ++borrowed;
      });
    } catch (...) {
      owner.for_each_memory([&](const void* data, uint64_t size_bytes) {
        if (given_back++ < borrowed) verbs_->give_back(data, size_bytes);
      });
      throw;
    }
  }
  template <class Owner>
  void give_back_all(const Owner& owner) {
    if (!verbs_) return;
    owner.for_each_memory([this](const void* data, uint64_t size_bytes) { verbs_->give_back(data, size_bytes); });
  }

  bool idle() const;
  // Tells the peers why this rank ends the group. Null: says goodbye. Best effort: peers that do not hear it find out
  // by themselves.
  void say_farewell(const FailureNotice* notice) noexcept;
  // Ranks that have ended, ascending: see Port.
  std::vector<uint32_t> find_gone(uint64_t now_us);
  CounterList counters() const;
  // The networks. Empty without one.
  std::string describe() const;

 private:
  std::vector<TriedPort*> networks() const;

  const uint32_t rank_;
  const uint32_t world_;
  const uint64_t peer_timeout_us_;
  CounterPage& counter_page_;
  Mailbox& mailbox_;
  std::unique_ptr<ShmPort> shm_;
  std::unique_ptr<UdpPort> udp_;
  std::unique_ptr<DevicePort> verbs_;
  std::unique_ptr<AggregatorPort> aggregator_;
  std::vector<Port*> connected_;
};

}  // namespace sennit
