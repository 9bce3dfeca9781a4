// SPDX-License-Identifier: Apache-2.0
// The port for RDMA devices: the same packets and flows as udp, put on the wire and into place by the device.
//
// A rail is a RoCE v2 address of the device. Each path is one queue pair of the unreliable connected service; all share
// one completion queue and one queue of receive buffers. Data is RDMA WRITE with immediate of at most one packet:
// what is lost then concerns no other message. Control payloads and eager packets are sends. Loss, order, paths and
// credits are flow's affair here as elsewhere.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "flow/receive_budget.hpp"
#include "messages/lane.hpp"
#include "ports/agreement.hpp"
#include "ports/flow_lane.hpp"
#include "ports/flow_totals.hpp"
#include "ports/send_config.hpp"
#include "ports/verbs_buffers.hpp"
#include "ports/verbs_exposure.hpp"
#include "ports/verbs_queue_pair.hpp"

namespace sennit {

struct VerbsConfig : SendConfig {
  std::vector<std::string> addresses;  // of this machine; all of one device
  VerbsService service = VerbsService::uc;
  const VerbsLibrary* library = nullptr;  // null: this machine's
};

class VerbsPort final : public Port {
 public:
  // Opens the device and makes the queue pairs. Throws std::runtime_error or std::invalid_argument, saying what to do.
  VerbsPort(uint32_t rank, uint32_t size, const VerbsConfig& config);
  ~VerbsPort() override;

  // What peers hand to their connect(), by way of rendezvous.
  std::vector<std::byte> local_info() const { return offer_.encode(); }
  // Throws std::invalid_argument when the peer's information does not fit to ours, std::system_error where the device
  // cannot reach it.
  void connect(uint32_t peer, std::span<const std::byte> info, LaneSink& sink);
  Lane& lane(uint32_t peer);
  // An operation's memory, from its post to its end (VerbsRegistrations).
  void borrow(const void* address, size_t size_bytes) { registrations_->borrow(address, size_bytes); }
  void give_back(const void* address, size_t size_bytes) { registrations_->give_back(address, size_bytes); }

  std::string_view name() const override { return "verbs"; }
  bool progress(uint64_t now_us) override;
  void check_on_peers(uint64_t now_us) override;
  std::vector<uint32_t> find_gone(uint64_t now_us) override;
  uint64_t next_timeout_us() const override;
  void append_poll_fds(std::vector<pollfd>& out) const override;
  std::string_view failure() const override;
  bool idle() const override;
  void abort(std::string_view reason) override;
  void close() override;

  CounterList counters() const;
  std::string describe() const;

 private:
  static constexpr size_t BATCH_MAX_PACKETS = 32;
  struct Path;
  struct Peer;

  void open_queues(uint32_t peer_count);
  void open_binder();
  uint64_t name_of(const Path& path) const;

  // verbs_completions.cpp
  bool poll_completions(uint64_t now_us);
  void on_completion(const ibv_wc& completion, uint64_t now_us);
  void on_receive(const ibv_wc& completion, uint64_t now_us);
  void on_eager(Path& path, uint32_t immediate, std::span<const std::byte> payload, uint64_t now_us);
  void repost_receives();
  bool arm();

  // verbs_events.cpp
  void poll_events(uint64_t now_us);
  void on_event(const ibv_async_event& event, uint64_t now_us);
  void on_path_error(Path& path, uint64_t now_us);
  void revive_paths(uint64_t now_us);

  bool send_round(uint64_t now_us);
  bool send_from(Peer& peer, uint64_t now_us);
  bool has_room(const Peer& peer) const;
  void send_control(Path& path, size_t buffer, size_t size_bytes);
  void send_data(Path& path, std::span<const flow::DataOut> packets);
  void send_farewells(uint64_t now_us);
  size_t take_buffer();
  void fail(std::string reason);

  uint32_t rank_;
  VerbsConfig config_;
  std::vector<VerbsAddress> rails_;
  std::vector<bool> is_rail_up_;
  RoceOffer offer_;                                                                    // ours
  flow::ReceiveBudget receive_budget_{{.min_bytes = 65'536, .target_queue_us = 250}};  // before the flows
  // In the order in which verbs objects need each other: the last one goes first.
  std::unique_ptr<VerbsDevice> device_;
  std::unique_ptr<VerbsRegistrations> registrations_;
  VerbsHandle<ibv_comp_channel> channel_;
  VerbsHandle<ibv_cq> completions_;
  VerbsHandle<ibv_srq> receives_;
  std::unique_ptr<VerbsBuffers> receive_buffers_, send_buffers_;
  std::unique_ptr<VerbsQueuePair> binder_;
  std::unique_ptr<VerbsExposure> exposure_;
  std::vector<std::unique_ptr<Path>> paths_;                // of all peers, connected or not
  std::vector<std::unique_ptr<std::byte[]>> eager_memory_;  // by rank
  std::unordered_map<uint32_t, Path*> paths_by_qpn_;
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null where not connected
  std::vector<Peer*> connected_;
  VerbsQueuePair::Release release_;
  std::vector<size_t> free_buffers_;  // of send_buffers_
  std::vector<size_t> repost_;        // of receive_buffers_
  size_t receive_count_ = 0, next_peer_ = 0;
  uint32_t depth_ = 0;  // of each queue pair
  uint32_t unacknowledged_events_ = 0;
  bool is_armed_ = false;
  uint64_t last_now_us_ = 0, look_at_us_ = 0, revive_at_us_ = UINT64_MAX, revive_pause_us_ = 0;
  std::string failure_, farewell_;

  struct Counters {
    uint64_t send_calls = 0, send_blocked = 0, send_dropped = 0;
    uint64_t remote_access_errors = 0;  // packets that the device refused: a key that is gone, most of them late copies
    uint64_t receive_errors = 0, unknown_qpn = 0, bad_slot = 0;
    uint64_t path_errors = 0, path_revivals = 0, port_events = 0;
  } counters_;
};

}  // namespace sennit
