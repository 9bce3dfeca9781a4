// SPDX-License-Identifier: Apache-2.0
// The port that runs anywhere: RoCEv2 packets on plain UDP sockets, without a NIC that knows RDMA.
//
// A rail is one local address: a listening socket (UDP port 4791 if it is free) and `path_count` sending sockets, which
// the groups of a process share. Their source ports are the entropies that routers hash. Rails of two ranks are paired
// in order within each address family. A flow has `path_count` paths over each pair. An interface with addresses of
// both families has two rails, of which the trial chooses one for each peer. Driven by progress().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "flow/agenda.hpp"
#include "flow/receive_budget.hpp"
#include "messages/lane.hpp"
#include "ports/agreement.hpp"
#include "ports/exposure.hpp"
#include "ports/flow_lane.hpp"
#include "ports/interfaces.hpp"
#include "ports/of_process.hpp"
#include "ports/roce_offer.hpp"
#include "ports/trial.hpp"
#include "ports/udp/udp_receiver.hpp"
#include "ports/udp/udp_sender.hpp"
#include "telemetry/counter_page.hpp"

namespace sennit {

struct UdpRailConfig {
  std::string address;  // IPv4 or IPv6, on this machine
  uint16_t port = 0;    // of the listening socket; 0: 4791, or any port (of the range) if that is taken
  std::string other_family_address = {};  // of the same interface; empty: there is none
};

struct UdpConfig : SendConfig {
  std::vector<UdpRailConfig> rails;
  PortRange ports{};                // of all sockets
  size_t receive_buffer_bytes = 0;  // of each listening socket; 0: from the number of peers
};

class UdpPort final : public TriedPort {
 public:
  // Opens the sockets. Throws std::system_error or std::invalid_argument with what to do.
  UdpPort(uint32_t rank, uint32_t size, const UdpConfig& config);
  ~UdpPort() override;

  // What peers pass to their connect(), sent through rendezvous.
  std::vector<std::byte> local_info() const;
  // What that peer alone needs besides: it follows local_info() in what the peer passes to connect().
  std::vector<std::byte> info_for(uint32_t peer) const { return for_peers_.at(peer).encode(); }
  // Throws std::invalid_argument if the peer's information does not fit ours. After a trial with this peer, connect
  // uses the result of the trial.
  void connect(uint32_t peer, std::span<const std::byte> info, LaneSink& sink);
  Lane& lane(uint32_t peer);
  // After the last connect: closes the sockets of rails that no flow uses.
  void close_unused_rails();

  void begin_trial(uint32_t peer, std::span<const std::byte> info, LaneSink& sink) override;
  bool try_network(uint64_t now_us) override;
  uint64_t next_trial_us() const override;
  Trial* trial(uint32_t peer) override;
  std::vector<TriedPath> tried_paths(uint32_t peer) const override;

  std::string_view name() const override { return "udp"; }
  bool progress(uint64_t now_us) override;
  // While operations go on, the next round sends.
  void tell_peers(bool has_ended, uint64_t now_us) override {
    if (has_ended) send_round(now_us);
  }
  void check_on_peers(uint64_t now_us) override;
  std::vector<uint32_t> find_gone(uint64_t now_us) override;
  uint64_t next_timeout_us() const override;
  void append_poll_fds(std::vector<pollfd>& out) const override;
  bool idle() const override;
  void abort(std::string_view reason) override;
  void close() override;
  void revoke() noexcept override;

  CounterList counters() const;
  std::string describe() const;
  const flow::Agenda& agenda() const { return agenda_; }

 private:
  struct Rail;
  struct Peer;
  // How often the kernel is asked which packets came back: a system call for each socket.
  static constexpr uint64_t REFUSALS_US = 20'000;

  // Makes the paths to a peer. They are not in use yet.
  Peer& prepare(uint32_t peer, std::span<const std::byte> info, LaneSink& sink, bool is_tried);
  void start(Peer& peer);
  bool send_probes(Peer& peer, uint64_t now_us);
  void open_rail(const std::string& address, uint16_t port, uint8_t interface, const UdpConfig& config);
  std::vector<uint32_t> reserve_queue_pairs(uint32_t count);
  Peer& connected(uint32_t peer);
  bool receive_from(UdpReceiver& receiver, const flow::CallClock& clock);
  bool pump(uint64_t now_us);
  bool send_round(uint64_t now_us);
  bool send_from(Peer& peer, uint64_t now_us);
  void send_abort(Peer& peer, std::string_view reason);  // sends over every rail, once
  void note_over_mtu(Peer& peer, UdpPath& path, uint64_t now_us);
  void note_refused(UdpSender& sender, uint64_t now_us);
  void look_for_refusals(uint64_t now_us);
  void send_farewells(uint64_t now_us);
  uint32_t next_key();

  uint32_t rank_;
  RoceOffer offer_;                         // ours
  std::vector<RoceOffer::Peer> for_peers_;  // by rank
  const SendConfig send_;
  // Read once: with each of many peers it would cost more than all else that is agreed with it.
  const std::vector<Interface> interfaces_ = read_interfaces();
  flow::ReceiveBudget receive_budget_{
      {.min_bytes = 65'536, .target_queue_us = 250}};  // before peers_, whose flows return their grants at the end
  flow::Agenda agenda_;                                // its members are those of connected_, in that order
  const Counted<UdpSendCounters> send_counters_;
  const Counted<UdpReceiveCounters> receive_counters_;
  UdpPathByQpn paths_by_qpn_;
  KeysOnly exposure_{rank_, [this] { return next_key(); }};
  LoanPool loans_{exposure_};
  const std::shared_ptr<UdpSendSockets> send_sockets_ = of_process<UdpSendSockets>();
  std::vector<std::unique_ptr<Rail>> rails_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null where not connected
  std::vector<Peer*> connected_;
  size_t next_turn_ = 0;  // the ready peer that sends first in the next round
  struct Unmap {
    size_t size_bytes;
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Unmap> eager_memory_{nullptr, Unmap{0}};  // a ring for each rank
  // A timer counts as expired only after what arrived earlier is read, because this thread may not have run in between.
  uint64_t read_until_us_ = 0;
  uint64_t last_now_us_ = 0, look_at_us_ = 0;
  std::string farewell_;        // why the group ended
  std::vector<uint32_t> keys_;  // random numbers, not used yet
};

}  // namespace sennit
