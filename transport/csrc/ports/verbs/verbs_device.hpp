// SPDX-License-Identifier: Apache-2.0
// RDMA devices: the addresses of this machine that they serve, and an opened device.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ports/verbs/verbs_library.hpp"
#include "wire/endpoint.hpp"

namespace sennit {

// A RoCE v2 entry of a device's GID table: an address of the interface below the device.
struct VerbsAddress {
  std::string device;
  uint8_t port = 0;
  uint8_t gid_index = 0;
  ibv_gid gid{};
  wire::Endpoint endpoint;  // the same address; UDP port 4791, as always with a device
  uint32_t interface_index = 0;
  // State of the port, now:
  bool is_active = false;
  uint32_t mtu_bytes = 0;        // the largest payload of a packet
  uint16_t partition_index = 0;  // index of the partition of all packets in its table; NO_PARTITION: it has none
  static constexpr uint16_t NO_PARTITION = UINT16_MAX;
};

// A port of a device, and the addresses that it serves.
struct VerbsDevicePort {
  std::string device;
  uint8_t number = 0;  // 0: the device cannot be opened or read, and `problem` says why
  std::string problem;
  ibv_port_state state = IBV_PORT_NOP;
  bool is_ethernet = false;
  uint32_t mtu_bytes = 0;
  std::vector<uint16_t> partitions;  // keys; 0: an empty entry
  std::vector<VerbsAddress> addresses;
};

// The GID that stands for an address; IPv4 is mapped into IPv6 (RFC 4291, 2.5.5.2).
ibv_gid gid_of(const wire::Endpoint& endpoint);
// "rxe0 port 1 GID 2 [2001:db8::1] 4096 bytes", with ", down" if it is down.
std::string describe(const VerbsAddress& address);

// The ports of all devices. None is not an error.
std::vector<VerbsDevicePort> find_verbs_ports(const VerbsLibrary& library);
// The entry that serves `address` and can be used now. Throws std::invalid_argument with what there is and what to do.
VerbsAddress choose_verbs_address(const std::vector<VerbsDevicePort>& known, const std::string& address);

class VerbsDevice {
 public:
  // Throws std::system_error.
  VerbsDevice(const VerbsLibrary& library, const std::string& name);

  const VerbsLibrary& library() const { return library_; }
  const std::string& name() const { return name_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* domain() const { return domain_.get(); }
  const ibv_device_attr& limits() const { return limits_; }
  // Whether keys can be given and taken back in microseconds (memory windows of type 1).
  bool has_windows() const;

 private:
  const VerbsLibrary& library_;
  std::string name_;
  VerbsHandle<ibv_context> context_;
  VerbsHandle<ibv_pd> domain_;
  ibv_device_attr limits_{};
};

// Throws std::system_error with errno, the device and what was tried.
[[noreturn]] void raise_verbs_error(int error, const std::string& what);

}  // namespace sennit
