// SPDX-License-Identifier: Apache-2.0
// The port for RDMA devices as the engine and the bindings see it, which needs no header of libibverbs.
//
// A build that has found those headers has the verbs port behind it (verbs_port.cpp). Another build has
// verbs_absent.cpp, where each of these functions says what is missing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "messages/lane.hpp"
#include "ports/agreement.hpp"
#include "ports/trial.hpp"
#include "telemetry/counter_page.hpp"

namespace sennit {

struct VerbsLibrary;

enum class VerbsService : uint8_t { uc, rc };

struct VerbsConfig : SendConfig {
  std::vector<std::string> addresses;  // addresses of this machine, a rail each
  VerbsService service = VerbsService::uc;
  const VerbsLibrary* library = nullptr;  // null: this machine's libibverbs
};

class DevicePort : public TriedPort {
 public:
  // What peers pass to their connect(), sent through rendezvous.
  virtual std::vector<std::byte> local_info() const = 0;
  // What that peer alone needs besides: it follows local_info() in what the peer passes to connect().
  virtual std::vector<std::byte> info_for(uint32_t peer) const = 0;
  // Throws std::invalid_argument if the peer's information does not fit ours, and std::system_error if the device
  // cannot reach the peer.
  virtual void connect(uint32_t peer, std::span<const std::byte> info, LaneSink& sink) = 0;
  virtual Lane& lane(uint32_t peer) = 0;
  // Memory that stays in place: an operation's buffers from its post to its end, or what the user guarantees
  // (VerbsRegistrations).
  virtual void borrow(const void* address, size_t size_bytes) = 0;
  virtual void give_back(const void* address, size_t size_bytes) = 0;
  virtual CounterList counters() const = 0;
  virtual std::string describe() const = 0;
};

// A port of an RDMA device, for a list.
struct ListedPort {
  struct Gid {
    uint8_t index = 0;
    std::string address;
    uint32_t interface_index = 0;
  };
  std::string device;
  uint8_t number = 0;  // 0: the device cannot be opened or read, and `problem` says why
  std::string problem;
  int state = 0;  // ibv_port_state
  bool is_ethernet = false;
  uint32_t mtu_bytes = 0;
  std::vector<uint16_t> partitions;  // keys; 0: an empty entry
  std::vector<Gid> gids;             // RoCE v2 alone
};

// Whether this build has the verbs port.
bool has_verbs();
// Opens the devices and makes the queue pairs. Throws std::runtime_error or std::invalid_argument with what to do.
std::unique_ptr<DevicePort> open_verbs(uint32_t rank, uint32_t size, const VerbsConfig& config);
// The ports of all devices. None is not an error. Throws std::runtime_error as open_verbs.
std::vector<ListedPort> list_device_ports();

}  // namespace sennit
