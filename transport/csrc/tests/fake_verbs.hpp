// SPDX-License-Identifier: Apache-2.0
// An RDMA device of a test's own, behind the functions of libibverbs: queue pairs of one process, and between them
// whatever the test lets happen to packets. It places what it is told to by itself, as a NIC does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ports/verbs_library.hpp"

namespace sennit::test {

struct FakePacket {
  uint32_t qpn;  // destination
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

  // Settings, before or between.
  std::vector<std::string> addresses = {"fd00::1"};  // GIDs of the device
  bool has_device = true, can_be_opened = true, has_unreliable_service = true, has_windows = true;
  ibv_port_state port_state = IBV_PORT_ACTIVE;
  std::vector<uint16_t> partitions = {0xFFFF};
  ibv_mtu mtu = IBV_MTU_4096;
  uint64_t registration_max_bytes = UINT64_MAX;
  uint32_t window_max_count = UINT32_MAX;
  bool binds_are_slow = false;  // until finish_binds()
  bool can_connect = true;
  // What becomes of a packet: the copies that arrive now. The test may keep others.
  std::function<uint32_t(const FakePacket&)> network = [](const FakePacket&) { return 1u; };

  // Events.
  void arrive(const FakePacket& packet);
  void finish_binds();
  void break_queue_pair(uint32_t qpn);
  void raise(ibv_event_type type);

  // What was done.
  std::vector<uint32_t> bound_keys;  // of windows, in the order of their binding to memory
  uint32_t live_registrations = 0;
  uint64_t refused_keys = 0;
  std::vector<uint32_t> queue_pairs() const;

 private:
  struct Queue;
  struct Completions;
  struct Receives;
  struct Registration;
  struct Window;
  struct Context;
  struct Access {
    uint64_t address, size_bytes;
  };
  static FakeVerbs& self();
  static void complete(ibv_cq* queue, const ibv_wc& completion);
  void open_key(uint32_t key, uint64_t address, uint64_t size_bytes);

  VerbsLibrary library_{};
  std::unique_ptr<ibv_device> device_;
  ibv_device* device_list_[2] = {nullptr, nullptr};
  std::map<uint32_t, Queue*> queues_;
  std::map<uint32_t, Access> keys_;  // open to remote writes
  std::deque<std::function<void()>> slow_binds_;
  std::vector<Context*> contexts_;
  uint32_t next_qpn_ = 0x11, next_key_ = 0x100, windows_ = 0;
};

}  // namespace sennit::test
