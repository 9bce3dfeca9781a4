// SPDX-License-Identifier: Apache-2.0
#include "ports/interfaces.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string_view>

namespace sennit {
namespace {

// net/ipv6.h, as in /proc/net/if_inet6
constexpr unsigned SCOPE_LINK = 0x20;
// linux/if_addr.h: temporary addresses, and failed, deprecated and tentative ones
constexpr unsigned TEMPORARY = 0x01, UNUSABLE = 0x08 | 0x20 | 0x40;

class MtuReader {
 public:
  MtuReader() : fd_(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {}
  MtuReader(const MtuReader&) = delete;
  MtuReader& operator=(const MtuReader&) = delete;
  ~MtuReader() {
    if (fd_ >= 0) ::close(fd_);
  }

  // 0 if it cannot be read.
  size_t read_bytes(const std::string& name) const {
    ifreq request{};
    name.copy(request.ifr_name, IFNAMSIZ - 1);
    return fd_ >= 0 && ioctl(fd_, SIOCGIFMTU, &request) == 0 ? static_cast<size_t>(request.ifr_mtu) : 0;
  }

 private:
  int fd_;
};

InterfaceAddress ipv4_address(const ifaddrs& entry) {
  const auto address_of = [](const sockaddr* from) { return reinterpret_cast<const sockaddr_in*>(from)->sin_addr; };
  const in_addr address = address_of(entry.ifa_addr);
  InterfaceAddress out;
  out.endpoint.is_ipv6 = false;
  std::memcpy(out.endpoint.address.data(), &address, sizeof address);
  if (entry.ifa_netmask != nullptr)
    out.prefix_bits = static_cast<uint8_t>(std::popcount(address_of(entry.ifa_netmask).s_addr));
  out.is_offered = out.endpoint.address[0] != std::byte{169} || out.endpoint.address[1] != std::byte{254};  // RFC 3927
  return out;
}

Interface& named(std::vector<Interface>& interfaces, std::string_view name) {
  const auto known =
      std::find_if(interfaces.begin(), interfaces.end(), [&](const Interface& one) { return one.name == name; });
  if (known != interfaces.end()) return *known;
  interfaces.emplace_back().name = name;
  return interfaces.back();
}

}  // namespace

std::vector<Interface> read_interfaces(const std::string& if_inet6) {
  std::vector<Interface> out;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return out;
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, &freeifaddrs);
  const MtuReader mtu;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    // The name of an IPv4 address may have a label after a colon.
    const std::string_view label = entry->ifa_name;
    Interface& interface = named(out, label.substr(0, label.find(':')));
    interface.is_up = (entry->ifa_flags & IFF_UP) != 0;
    interface.is_loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    if (interface.mtu_bytes == 0) interface.mtu_bytes = mtu.read_bytes(interface.name);
    if (entry->ifa_addr != nullptr && entry->ifa_addr->sa_family == AF_INET)
      interface.addresses.push_back(ipv4_address(*entry));
  }
  // By C's library, as memory/available.cpp says.
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> table(std::fopen(if_inet6.c_str(), "re"), &std::fclose);
  std::vector<std::pair<std::string, InterfaceAddress>> temporary;
  std::array<char, 64> digits_read{}, name{};
  for (unsigned index, prefix_bits, scope, flags;
       table != nullptr && std::fscanf(table.get(), "%63s %x %x %x %x %63s", digits_read.data(), &index, &prefix_bits,
                                       &scope, &flags, name.data()) == 6;) {
    const std::string digits = digits_read.data();
    InterfaceAddress address;
    if (digits.size() != 2 * address.endpoint.address.size()) continue;
    for (size_t byte = 0; byte < address.endpoint.address.size(); ++byte)
      address.endpoint.address[byte] = static_cast<std::byte>(std::stoul(digits.substr(2 * byte, 2), nullptr, 16));
    address.prefix_bits = static_cast<uint8_t>(prefix_bits);
    address.is_offered = scope != SCOPE_LINK && (flags & UNUSABLE) == 0;
    if ((flags & TEMPORARY) != 0) {
      temporary.emplace_back(name.data(), address);
    } else {
      named(out, name.data()).addresses.push_back(address);
    }
  }
  for (const auto& [interface, address] : temporary) named(out, interface).addresses.push_back(address);
  return out;
}

InterfaceFacts facts_of(const std::vector<Interface>& interfaces, const wire::Endpoint& local) {
  wire::Endpoint wanted = local;
  wanted.port = 0;
  // All of 127.0.0.0/8 is on the loopback interface, which lists only 127.0.0.1.
  if (!local.is_ipv6 && local.address[0] == std::byte{127}) wanted = wire::parse_endpoint("127.0.0.1", 0);
  for (const Interface& interface : interfaces)
    for (const InterfaceAddress& address : interface.addresses)
      if (address.endpoint == wanted) return {interface.mtu_bytes, address.prefix_bits};
  return {};
}

size_t loopback_mtu_bytes(const std::vector<Interface>& interfaces, bool is_ipv6) {
  return facts_of(interfaces, wire::parse_endpoint(is_ipv6 ? "::1" : "127.0.0.1", 0)).mtu_bytes;
}

}  // namespace sennit
