// SPDX-License-Identifier: Apache-2.0
// Fake RDMA devices behind the functions of libibverbs: the queue pairs of one process, and between them whatever the
// test lets happen to packets. The devices place data on their own, as NICs do.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ports/verbs/verbs_library.hpp"

namespace sennit::test {

struct FakePacket {
  size_t device;  // destination
  uint32_t qpn;
  ibv_wr_opcode opcode;
  uint32_t immediate;  // as it is sent
  uint64_t address;
  uint32_t rkey;
  std::vector<std::byte> payload;
};

class FakeVerbs {
 public:
  FakeVerbs();
  ~FakeVerbs();
  FakeVerbs(const FakeVerbs&) = delete;
  const VerbsLibrary& library() const { return library_; }

  // Settings, before the devices are opened or later.
  std::vector<std::string> addresses = {"fd00::1"};  // GIDs of the device fake0
  std::vector<std::string> second_addresses;         // GIDs of the device fake1, which exists if it has any
  bool has_device = true, can_be_opened = true, has_unreliable_service = true, has_windows = true;
  ibv_port_state port_state = IBV_PORT_ACTIVE;
  bool is_stuck = false;  // what fake1 is asked to send never leaves and never completes
  std::vector<uint16_t> partitions = {0xFFFF};
  ibv_mtu mtu = IBV_MTU_4096;
  uint64_t registration_max_bytes = UINT64_MAX, locked_max_bytes = UINT64_MAX;  // of one, of all
  uint32_t window_max_count = UINT32_MAX;
  std::atomic<bool> binds_are_slow = false;  // until finish_binds()
  bool can_connect = true;
  // The fate of a packet: the copies that arrive now. The test may keep others.
  std::function<uint32_t(const FakePacket&)> network = [](const FakePacket&) { return 1u; };

  // Events.
  void arrive(const FakePacket& packet);
  void finish_binds();
  void break_queue_pair(uint32_t qpn);  // of fake0
  void raise(ibv_event_type type);      // by all devices; from any thread
  void raise(ibv_event_type type, size_t device);

  // What the devices did.
  std::vector<uint32_t> bound_keys;   // keys of windows, in the order of their binding to memory
  std::vector<uint32_t> opened_keys;  // keys for remote writes, of windows and registrations
  uint32_t live_registrations = 0;
  uint64_t locked_bytes = 0;
  uint64_t refused_keys = 0;
  uint64_t arrived[2] = {0, 0};  // by device
  std::vector<uint32_t> queue_pairs() const;

 private:
  struct Queue;
  struct Completions;
  struct Receives;
  struct Registration;
  struct Window;
  struct Context;
  struct Access {
    size_t device;
    uint64_t address, size_bytes;
  };
  using QueueName = std::pair<size_t, uint32_t>;  // device, number
  static FakeVerbs& self();
  static void complete(ibv_cq* queue, const ibv_wc& completion);
  size_t device_of(const ibv_context* context) const;
  size_t device_with(const ibv_gid& gid) const;
  uint32_t new_key(const ibv_context* context);
  void open_key(uint32_t key, const Access& access);

  VerbsLibrary library_{};
  ibv_device devices_[2] = {};
  ibv_device* device_list_[3] = {nullptr, nullptr, nullptr};
  std::map<QueueName, Queue*> queues_;
  std::map<uint32_t, Access> keys_;  // open to remote writes
  std::deque<std::function<void()>> slow_binds_;
  std::vector<Context*> contexts_;
  std::mutex events_mutex_;
  // Two devices may use one number for different queue pairs. Here they never use the same key, so a wrong key shows.
  uint32_t next_qpn_[2] = {0x11, 0x11}, next_key_[2] = {0x100, 0x8000'0100}, windows_ = 0;
};

}  // namespace sennit::test
