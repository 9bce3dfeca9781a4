// SPDX-License-Identifier: Apache-2.0
#include "ports/verbs_device.hpp"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "ports/udp_socket.hpp"
#include "wire/packet.hpp"

namespace sennit {
namespace {

constexpr std::array<std::byte, 12> MAPPED_IPV4 = {std::byte{0}, std::byte{0}, std::byte{0},    std::byte{0},
                                                   std::byte{0}, std::byte{0}, std::byte{0},    std::byte{0},
                                                   std::byte{0}, std::byte{0}, std::byte{0xFF}, std::byte{0xFF}};
// As many as rxe has. The kernel takes 64 KiB at most: with 2,048 the answer is EINVAL.
constexpr size_t GID_MAX_COUNT = 1'024;
// What a control payload may need whatever the MTU; a longer message would be of several packets.
constexpr uint32_t MTU_MIN_BYTES = 1'024;

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

// The structure that the exported function fills is an older, shorter one.
bool query_port(const VerbsLibrary& library, ibv_context* context, uint8_t port, ibv_port_attr& out) {
  out = {};
  return library.query_port(context, port, reinterpret_cast<_compat_ibv_port_attr*>(&out)) == 0;
}

void append_addresses(const VerbsLibrary& library, const std::string& name, ibv_context* context,
                      std::vector<VerbsAddress>& out) {
  std::vector<ibv_gid_entry> entries(GID_MAX_COUNT);
  const ssize_t count = library.query_gid_table(context, entries.data(), entries.size(), 0, sizeof entries[0]);
  for (ssize_t index = 0; index < count; ++index) {
    const ibv_gid_entry& entry = entries[static_cast<size_t>(index)];
    ibv_port_attr port;
    if (entry.gid_type != IBV_GID_TYPE_ROCE_V2 || entry.gid_index > UINT8_MAX) continue;
    if (!query_port(library, context, static_cast<uint8_t>(entry.port_num), port)) continue;
    VerbsAddress& address = out.emplace_back();
    address.device = name;
    address.port = static_cast<uint8_t>(entry.port_num);
    address.gid_index = static_cast<uint8_t>(entry.gid_index);
    address.gid = entry.gid;
    address.endpoint = endpoint_of(entry.gid);
    address.interface_index = entry.ndev_ifindex;
    address.is_active = port.state == IBV_PORT_ACTIVE;
    // IBTA: 1 is 256 bytes, each next one the double.
    address.mtu_bytes = 128u << port.active_mtu;
  }
}

std::string list(const std::vector<VerbsAddress>& known) {
  if (known.empty())
    return "there is no RDMA device with a RoCE v2 address (see `rdma link`; soft-RoCE: `rdma link add rxe0 type rxe "
           "netdev NAME`)";
  std::string text = "there are: ";
  for (const VerbsAddress& address : known) text.append(&address == &known[0] ? "" : "; ").append(describe(address));
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

std::vector<VerbsAddress> find_verbs_addresses(const VerbsLibrary& library) {
  std::vector<VerbsAddress> out;
  int count = 0;
  ibv_device** devices = library.get_device_list(&count);
  if (devices == nullptr) {
    // A kernel without RDMA has no such list.
    if (errno == ENOSYS || errno == ENOENT) return out;
    raise_verbs_error(errno, "cannot list RDMA devices");
  }
  for (int index = 0; index < count; ++index) {
    ibv_context* context = library.open_device(devices[index]);
    if (context == nullptr) continue;  // another user's, or one that is going away
    append_addresses(library, library.get_device_name(devices[index]), context, out);
    library.close_device(context);
  }
  library.free_device_list(devices);
  return out;
}

VerbsAddress choose_verbs_address(const std::vector<VerbsAddress>& known, const std::string& address) {
  const wire::Endpoint wanted = parse_endpoint(address, wire::ROCE_UDP_PORT);
  const VerbsAddress* found = nullptr;
  for (const VerbsAddress& one : known)
    if (one.endpoint == wanted && (found == nullptr || !found->is_active)) found = &one;
  if (found == nullptr)
    throw std::invalid_argument("verbs: no RDMA device has a RoCE v2 GID for " + address + "; " + list(known));
  if (!found->is_active)
    throw std::invalid_argument("verbs: the port is down: " + describe(*found) +
                                "; set its interface up (ip link set NAME up) or choose another address");
  if (found->mtu_bytes < MTU_MIN_BYTES)
    throw std::invalid_argument("verbs: " + describe(*found) + " a packet; at least " + std::to_string(MTU_MIN_BYTES) +
                                " are needed: give its interface an MTU of 1500 or more");
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
  // Events are looked for, never waited for.
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
