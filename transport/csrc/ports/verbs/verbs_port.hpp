// SPDX-License-Identifier: Apache-2.0
// The port for RDMA devices: the same packets and flows as udp, but the device sends and places the packets.
//
// A rail is a RoCE v2 address of a device. Each path is one queue pair of the unreliable connected service. Data is
// RDMA WRITE with immediate of at most one packet, so a lost packet affects no other message. Control payloads and
// eager packets are sends. The flow handles loss, order, paths and credits, as in the other ports. With several
// devices, each device has its own key to a message (docs/decisions/0032).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "flow/agenda.hpp"
#include "flow/receive_budget.hpp"
#include "messages/lane.hpp"
#include "ports/flow_lane.hpp"
#include "ports/trial.hpp"
#include "ports/verbs/device_port.hpp"
#include "ports/verbs/verbs_adapter.hpp"
#include "ports/verbs/verbs_exposure.hpp"
#include "ports/verbs/verbs_queue_pair.hpp"
#include "ports/verbs/verbs_registrations.hpp"

namespace sennit {

class VerbsPort final : public DevicePort {
 public:
  // A device keeps the state of its queue pairs in host memory and caches some thousands of them. With 5,000
  // connections a ConnectX-5 reads half as fast (Kalia et al., "Datacenter RPCs can be General and Fast", NSDI 2019,
  // figure 1). So a large group has fewer paths to each peer.
  static constexpr size_t QUEUE_PAIR_GOOD_COUNT = 4'096;
  // How many of the `wanted` paths each of `places` (a peer over a rail) gets: at least one.
  static uint32_t path_count(size_t places, uint32_t wanted) {
    return static_cast<uint32_t>(std::clamp<size_t>(QUEUE_PAIR_GOOD_COUNT / places, 1, wanted));
  }

  // Opens the devices and makes the queue pairs. Throws std::runtime_error or std::invalid_argument with what to do.
  VerbsPort(uint32_t rank, uint32_t size, const VerbsConfig& config);
  ~VerbsPort() override;

  std::vector<std::byte> local_info() const override { return offer_.encode(); }
  std::vector<std::byte> info_for(uint32_t peer) const override { return for_peers_.at(peer).encode(); }
  void connect(uint32_t peer, std::span<const std::byte> info, LaneSink& sink) override;
  Lane& lane(uint32_t peer) override;
  void begin_trial(uint32_t peer, std::span<const std::byte> info, LaneSink& sink) override;
  bool try_network(uint64_t now_us) override;
  uint64_t next_trial_us() const override;
  Trial* trial(uint32_t peer) override;
  std::vector<TriedPath> tried_paths(uint32_t peer) const override;
  void borrow(const void* address, size_t size_bytes) override;
  void give_back(const void* address, size_t size_bytes) override;

  std::string_view name() const override { return "verbs"; }
  bool progress(uint64_t now_us) override;
  // While operations go on, the next round sends.
  void tell_peers(bool has_ended, uint64_t now_us) override {
    if (has_ended) send_round(now_us);
  }
  std::vector<uint32_t> find_gone(uint64_t now_us) override;
  uint64_t next_timeout_us() const override;
  void append_poll_fds(std::vector<pollfd>& out) const override;
  std::string_view failure() const override;
  bool idle() const override;
  void abort(std::string_view reason) override;
  void close() override;
  void revoke() noexcept override;

  CounterList counters() const override;
  std::string describe() const override;

 private:
  static constexpr size_t BATCH_MAX_PACKETS = 32;
  struct Path;
  struct Peer;

  struct Rail {
    VerbsAddress address;
    VerbsAdapter* adapter = nullptr;
    bool is_up = true;  // state of its port, as the device last reported
  };

  void open_adapters(uint32_t peer_count);
  void make_offer(uint32_t size);
  void make_paths(uint32_t peer);
  Path* find_path(const VerbsAdapter& adapter, uint32_t qpn) const;
  uint64_t name_of(const Path& path) const;

  // Connections.
  // Connects the queue pairs to a peer. They carry no messages yet.
  Peer& prepare(uint32_t peer, std::span<const std::byte> info, LaneSink& sink);
  void start(Peer& peer);
  bool send_probes(Peer& peer, uint64_t now_us);

  // Completions.
  bool poll_completions(uint64_t now_us);
  bool poll_completions(VerbsAdapter& adapter, uint64_t now_us);
  void on_completion(VerbsAdapter& adapter, const ibv_wc& completion, uint64_t now_us);
  void on_receive(VerbsAdapter& adapter, const ibv_wc& completion, uint64_t now_us);
  void on_eager(Path& path, uint32_t immediate, std::span<const std::byte> payload, uint64_t now_us);
  bool arm();

  // Events of the device.
  void poll_events(uint64_t now_us);
  void on_event(VerbsAdapter& adapter, const ibv_async_event& event, uint64_t now_us);
  void on_port(VerbsAdapter& adapter, uint8_t port, bool is_up, uint64_t now_us);
  void on_path_error(Path& path, trace::PortError where, uint32_t error, uint64_t now_us);
  void break_off(Path& path);
  void revive_paths(uint64_t now_us);

  bool send_round(uint64_t now_us);
  bool send_from(Peer& peer, uint64_t now_us);
  bool has_room(const Peer& peer) const;
  bool is_usable(const Path& path) const;
  void send_control(Path& path, size_t buffer, size_t size_bytes);
  void send_data(Path& path, std::span<const flow::DataOut> packets);
  void send_farewells(uint64_t now_us);
  size_t take_buffer();
  void let_go(VerbsAdapter& adapter, const VerbsQueuePair::Held& held);
  // `event`: ibv_event_type, or 0 if there was none.
  void fail(std::string reason, uint32_t event = 0);

  // A device does not report when a packet arrived, so the wait for this host looks like queueing. With udp's target
  // the budget would always be at its minimum. So only losses shrink the budget of UC (QUEUE_OVERFLOWED_US is twice
  // this). For RC the minimum is best, because the device sends everything in flight again.
  static flow::ReceiveBudgetConfig receive_budget_of(VerbsService service) {
    if (service == VerbsService::rc) return {.min_bytes = 65'536, .target_queue_us = 250};
    return {.start_bytes = 1'048'576, .min_bytes = 65'536, .target_queue_us = 32'000};
  }

  uint32_t rank_;
  VerbsConfig config_;  // with the paths that there are
  std::vector<Rail> rails_;
  RoceOffer offer_;                                                         // ours
  std::vector<RoceOffer::Peer> for_peers_;                                  // by rank
  flow::ReceiveBudget receive_budget_{receive_budget_of(config_.service)};  // before the flows
  flow::Agenda agenda_;  // its members are those of connected_, in that order
  VerbsBuffers send_buffers_;
  std::vector<std::unique_ptr<VerbsAdapter>> adapters_;  // before the objects of each adapter
  VerbsJointExposure exposure_;
  LoanPool loans_{exposure_};
  std::vector<std::unique_ptr<Path>> paths_;                // paths to all peers, connected or not
  std::vector<std::unique_ptr<std::byte[]>> eager_memory_;  // by rank
  std::unordered_map<uint64_t, Path*> paths_by_qpn_;        // for one device: see find_path
  std::vector<std::unique_ptr<Peer>> peers_;                // by rank; null where not connected
  std::vector<Peer*> connected_;
  std::vector<VerbsQueuePair::Release> releases_;  // by adapter
  std::vector<size_t> free_buffers_;               // of send_buffers_
  size_t next_turn_ = 0;
  uint64_t last_now_us_ = 0, look_at_us_ = 0, revive_at_us_ = UINT64_MAX, revive_pause_us_ = 0;
  bool is_cut_off_ = false;  // queue pairs stay as they are, because keys may still be open
  std::string failure_, farewell_;

  struct Counters {
    uint64_t send_calls = 0, send_blocked = 0, send_dropped = 0;
    uint64_t remote_access_errors = 0;  // packets that the device refused because the key is gone, mostly late copies
    uint64_t receive_errors = 0, unknown_qpn = 0, bad_slot = 0;
    uint64_t path_errors = 0, path_revivals = 0, port_events = 0;

    static constexpr const char* GROUP = "verbs";
    static std::vector<std::string> names() {
      return {"send_calls",  "send_blocked", "send_dropped", "remote_access_errors", "receive_errors",
              "unknown_qpn", "bad_slot",     "path_errors",  "path_revivals",        "port_events"};
    }
  };
  const Counted<Counters> counters_;
};

}  // namespace sennit
