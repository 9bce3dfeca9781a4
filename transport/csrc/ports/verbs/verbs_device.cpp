// SPDX-License-Identifier: Apache-2.0
#include "ports/verbs/verbs_device.hpp"

#include <arpa/inet.h>
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <stdexcept>
#include <system_error>

#include "ports/verbs/device_port.hpp"
#include "wire/packet.hpp"

namespace sennit {
namespace {

constexpr std::array<std::byte, 12> MAPPED_IPV4 = {std::byte{0}, std::byte{0}, std::byte{0},    std::byte{0},
                                                   std::byte{0}, std::byte{0}, std::byte{0},    std::byte{0},
                                                   std::byte{0}, std::byte{0}, std::byte{0xFF}, std::byte{0xFF}};
// As many as rxe has. The kernel allows 64 KiB at most: 2,048 gives EINVAL.
constexpr size_t GID_MAX_COUNT = 1'024;
// What a control payload may need at any MTU. A longer message would take several packets.
constexpr uint32_t MTU_MIN_BYTES = 1'024;
constexpr uint16_t PARTITION_FULL_MEMBER = 0x8000;

wire::Endpoint endpoint_of(const ibv_gid& gid) {
  wire::Endpoint endpoint;
  endpoint.port = wire::ROCE_UDP_PORT;
  std::array<std::byte, 16> raw;
  std::memcpy(raw.data(), gid.raw, raw.size());
  endpoint.is_ipv6 = !std::equal(MAPPED_IPV4.begin(), MAPPED_IPV4.end(), raw.begin());
  if (endpoint.is_ipv6) {
    endpoint.address = raw;
  } else {
    std::copy_n(raw.begin() + MAPPED_IPV4.size(), 4, endpoint.address.begin());
  }
  return endpoint;
}

// The structure that the exported function fills is older and shorter.
bool query_port(const VerbsLibrary& library, ibv_context* context, uint8_t port, ibv_port_attr& out) {
  out = {};
  return library.query_port(context, port, reinterpret_cast<_compat_ibv_port_attr*>(&out)) == 0;
}

std::vector<uint16_t> read_partitions(const VerbsLibrary& library, ibv_context* context, uint8_t port, size_t count) {
  std::vector<uint16_t> out;
  for (size_t index = 0; index < count; ++index) {
    __be16 key = 0;
    library.query_pkey(context, port, static_cast<int>(index), &key);
    out.push_back(ntohs(key));
  }
  return out;
}

// Full members, with the upper bit set, may talk to all. Others may talk only to full members (IBTA, 10.9.2).
uint16_t partition_index_of(const std::vector<uint16_t>& partitions) {
  const auto full = std::find(partitions.begin(), partitions.end(), wire::DEFAULT_PARTITION_KEY);
  const auto found = full != partitions.end() ? full
                                              : std::find(partitions.begin(), partitions.end(),
                                                          wire::DEFAULT_PARTITION_KEY & ~PARTITION_FULL_MEMBER);
  return found == partitions.end() ? VerbsAddress::NO_PARTITION : static_cast<uint16_t>(found - partitions.begin());
}

VerbsDevicePort read_port(const VerbsLibrary& library, const std::string& device, ibv_context* context, uint8_t number,
                          std::span<const ibv_gid_entry> gids) {
  VerbsDevicePort out;
  out.device = device;
  ibv_port_attr port;
  if (!query_port(library, context, number, port)) {
    out.problem = "port " + std::to_string(number) + " cannot be read";
    return out;
  }
  out.number = number;
  out.state = port.state;
  out.is_ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  // IBTA: 1 is 256 bytes, and each next value is the double.
  out.mtu_bytes = 128u << port.active_mtu;
  out.partitions = read_partitions(library, context, number, port.pkey_tbl_len);
  for (const ibv_gid_entry& gid : gids) {
    if (gid.port_num != number || gid.gid_type != IBV_GID_TYPE_ROCE_V2 || gid.gid_index > UINT8_MAX) continue;
    VerbsAddress& address = out.addresses.emplace_back();
    address.device = device;
    address.port = number;
    address.gid_index = static_cast<uint8_t>(gid.gid_index);
    address.gid = gid.gid;
    address.endpoint = endpoint_of(gid.gid);
    address.interface_index = gid.ndev_ifindex;
    address.is_active = port.state == IBV_PORT_ACTIVE;
    address.mtu_bytes = out.mtu_bytes;
    address.partition_index = partition_index_of(out.partitions);
  }
  return out;
}

void append_ports(const VerbsLibrary& library, ibv_device* device, std::vector<VerbsDevicePort>& out) {
  const std::string name = library.get_device_name(device);
  const auto add_problem = [&](std::string problem) {
    out.emplace_back();
    out.back().device = name;
    out.back().problem = std::move(problem);
  };
  const VerbsHandle<ibv_context> context(library.open_device(device), library.close_device);
  if (!context) return add_problem(std::string("cannot be opened: ") + std::strerror(errno));
  ibv_device_attr limits{};
  if (const int error = library.query_device(context.get(), &limits))
    return add_problem(std::string("cannot be read: ") + std::strerror(error));
  std::vector<ibv_gid_entry> gids(GID_MAX_COUNT);
  const ssize_t count = library.query_gid_table(context.get(), gids.data(), gids.size(), 0, sizeof gids[0]);
  gids.resize(count < 0 ? 0 : static_cast<size_t>(count));
  for (uint8_t number = 1; number <= limits.phys_port_cnt; ++number)
    out.push_back(read_port(library, name, context.get(), number, gids));
}

std::string list(const std::vector<VerbsDevicePort>& known) {
  if (known.empty())
    return "there is no RDMA device (see `rdma link`; soft-RoCE: `rdma link add rxe0 type rxe netdev NAME`)";
  std::string text;
  for (const VerbsDevicePort& port : known) {
    text.append(text.empty() ? "there are: " : "; ");
    if (port.number == 0) {
      text.append(port.device).append(" ").append(port.problem);
    } else if (port.addresses.empty()) {
      text.append(port.device).append(" port ").append(std::to_string(port.number));
      text.append(" without a RoCE v2 GID (give its interface an address)");
    }
    for (const VerbsAddress& address : port.addresses)
      text.append(&address == &port.addresses[0] ? "" : "; ").append(describe(address));
  }
  return text;
}

}  // namespace

void raise_verbs_error(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), "verbs: " + what);
}

ibv_gid gid_of(const wire::Endpoint& endpoint) {
  ibv_gid gid{};
  if (endpoint.is_ipv6) {
    std::memcpy(gid.raw, endpoint.address.data(), sizeof gid.raw);
  } else {
    std::memcpy(gid.raw, MAPPED_IPV4.data(), MAPPED_IPV4.size());
    std::memcpy(gid.raw + MAPPED_IPV4.size(), endpoint.address.data(), 4);
  }
  return gid;
}

std::string describe(const VerbsAddress& address) {
  return address.device + " port " + std::to_string(address.port) + " GID " + std::to_string(address.gid_index) + " " +
         text_of(address.endpoint) + " " + std::to_string(address.mtu_bytes) + " bytes" +
         (address.is_active ? "" : ", down");
}

std::vector<VerbsDevicePort> find_verbs_ports(const VerbsLibrary& library) {
  std::vector<VerbsDevicePort> out;
  int count = 0;
  ibv_device** devices = library.get_device_list(&count);
  if (devices == nullptr) {
    // A kernel without RDMA has no such list.
    if (errno == ENOSYS || errno == ENOENT) return out;
    raise_verbs_error(errno, "cannot list RDMA devices");
  }
  for (int index = 0; index < count; ++index) append_ports(library, devices[index], out);
  library.free_device_list(devices);
  return out;
}

std::vector<ListedPort> list_device_ports() {
  std::vector<ListedPort> out;
  for (const VerbsDevicePort& port : find_verbs_ports(VerbsLibrary::system())) {
    ListedPort& listed = out.emplace_back(ListedPort{
        port.device, port.number, port.problem, port.state, port.is_ethernet, port.mtu_bytes, port.partitions, {}});
    for (const VerbsAddress& one : port.addresses)
      listed.gids.push_back({one.gid_index, wire::address_text(one.endpoint), one.interface_index});
  }
  return out;
}

VerbsAddress choose_verbs_address(const std::vector<VerbsDevicePort>& known, const std::string& address) {
  const wire::Endpoint wanted = wire::parse_endpoint(address, wire::ROCE_UDP_PORT);
  const VerbsAddress* found = nullptr;
  for (const VerbsDevicePort& port : known)
    for (const VerbsAddress& one : port.addresses)
      if (one.endpoint == wanted && (found == nullptr || !found->is_active)) found = &one;
  if (found == nullptr)
    throw std::invalid_argument("verbs: no RDMA device has a RoCE v2 GID for " + address + "; " + list(known));
  if (!found->is_active)
    throw std::invalid_argument("verbs: the port is down: " + describe(*found) +
                                "; set its interface up (ip link set NAME up) or choose another address");
  if (found->mtu_bytes < MTU_MIN_BYTES)
    throw std::invalid_argument("verbs: " + describe(*found) + " a packet; at least " + std::to_string(MTU_MIN_BYTES) +
                                " are needed: give its interface an MTU of 1500 or more");
  if (found->partition_index == VerbsAddress::NO_PARTITION)
    throw std::invalid_argument("verbs: " + describe(*found) +
                                " is not in the default partition, 0xffff, in which all packets are: join it to that "
                                "(`cat /sys/class/infiniband/" +
                                found->device + "/ports/" + std::to_string(found->port) + "/pkeys/*` shows its own)");
  return *found;
}

VerbsDevice::VerbsDevice(const VerbsLibrary& library, const std::string& name)
    : library_(library), name_(name), context_(nullptr, library.close_device), domain_(nullptr, library.dealloc_pd) {
  int count = 0;
  ibv_device** devices = library.get_device_list(&count);
  if (devices == nullptr) raise_verbs_error(errno, "cannot list RDMA devices");
  for (int index = 0; index < count; ++index)
    if (name == library.get_device_name(devices[index])) context_.reset(library.open_device(devices[index]));
  const int error = errno;
  library.free_device_list(devices);
  if (!context_)
    raise_verbs_error(error, "cannot open " + name + "; is /dev/infiniband/uverbs* there, and readable and writable?");
  // Events are polled, never waited for.
  const int fd = context_->async_fd;
  if (fd >= 0 && fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0)
    raise_verbs_error(errno, "cannot read events of " + name);
  domain_.reset(library.alloc_pd(context_.get()));
  if (!domain_) raise_verbs_error(errno, "no protection domain on " + name);
  if (const int failed = library.query_device(context_.get(), &limits_))
    raise_verbs_error(failed, "cannot query " + name);
}

bool VerbsDevice::has_windows() const { return (limits_.device_cap_flags & IBV_DEVICE_MEM_WINDOW) != 0; }

}  // namespace sennit
