// SPDX-License-Identifier: Apache-2.0
// One queue pair: its way from RESET to RTS and back, and the contents of its send queue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "flow/sequence_ring.hpp"
#include "ports/verbs/device_port.hpp"
#include "ports/verbs/verbs_device.hpp"

namespace sennit {

// A request's wr_id, by which its completion finds its owner.
enum class VerbsRequest : uint8_t { send = 1, receive = 2, bind = 3 };

// `generation` counts the revivals of a queue pair: completions of an earlier generation are ignored. `number` is the
// owner's: the place in the queue for a send, the buffer for a receive.
constexpr uint64_t request_name(VerbsRequest kind, uint8_t generation = 0, uint16_t path = 0, uint32_t number = 0) {
  return uint64_t{static_cast<uint8_t>(kind)} << 56 | uint64_t{generation} << 48 | uint64_t{path} << 32 | number;
}
constexpr VerbsRequest request_kind(uint64_t name) { return static_cast<VerbsRequest>(name >> 56); }
constexpr uint8_t request_generation(uint64_t name) { return static_cast<uint8_t>(name >> 48); }
constexpr uint16_t request_path(uint64_t name) { return static_cast<uint16_t>(name >> 32); }
constexpr uint32_t request_number(uint64_t name) { return static_cast<uint32_t>(name); }

// Where a queue pair leads, and over which route.
struct VerbsRoute {
  VerbsAddress local;
  wire::Endpoint remote;
  uint32_t remote_qpn = 0;
  uint32_t mtu_bytes = 0;
  uint32_t first_psn = 0;     // of ours
  uint32_t expected_psn = 0;  // of theirs: RC only
  uint16_t entropy = 0;       // UDP source port, if the device derives it from the flow label; 0: the device's own
};

// The flow label from which RoCE v2 devices make this UDP source port (rdma-core: ibv_flow_label_to_udp_sport).
uint32_t flow_label_for(uint16_t source_port);

class VerbsQueuePair {
 public:
  // What a posted packet holds until it has left: a send buffer or a loan, by the owner's names.
  struct Held {
    enum class Kind : uint8_t { nothing, buffer, source } kind = Kind::nothing;
    uint64_t id = 0;
  };

  using Release = std::function<void(const Held&)>;

  // Throws std::system_error.
  VerbsQueuePair(const VerbsDevice& device, ibv_cq* completions, ibv_srq* receives, uint32_t depth,
                 VerbsService service = VerbsService::uc);

  ibv_qp* get() const { return handle_.get(); }
  uint32_t number() const { return handle_->qp_num; }
  // Makes it ready to send and receive. Throws std::system_error.
  void connect(const VerbsRoute& route);
  // Goes from any state back to ready, with the same route and number. False if that fails. The device has released
  // everything that was posted: `release` is called for each thing held.
  bool revive(const Release& release);
  // Takes and sends nothing from now on, and releases what was posted.
  void stop(const Release& release);
  bool is_ready() const { return is_ready_; }
  // Whether something posted has not left yet.
  bool holds_any() const { return !held_.empty(); }
  uint32_t room() const { return depth_ - static_cast<uint32_t>(held_.size()); }
  // Posts a chain of requests, one for each of `held`, all signalled by the last. Call room() first. If the device
  // refuses, the queue pair is no longer ready.
  void post(ibv_send_wr* first, std::span<const Held> held);
  // The completion of a request that post() signalled. Takes the low 32 bits of its wr_id.
  void on_sent(uint32_t number, const Release& release);

 private:
  void modify(ibv_qp_attr& attributes, int mask, const char* what);
  void to_init();
  void to_ready_to_receive();
  void to_ready_to_send();
  void release_all(const Release& release);

  const VerbsDevice& device_;
  const uint32_t depth_;
  const VerbsService service_;
  VerbsHandle<ibv_qp> handle_;
  VerbsRoute route_;
  flow::SequenceRing<Held> held_;  // in the order of posting
  bool is_ready_ = false;
};

}  // namespace sennit
