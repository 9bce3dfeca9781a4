// SPDX-License-Identifier: Apache-2.0
#include "ports/udp/udp_socket.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <system_error>
#include <utility>

// Linux's uapi numbers, for C libraries without them.
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#ifndef SCM_TIMESTAMPNS
#define SCM_TIMESTAMPNS SO_TIMESTAMPNS
#endif
#ifndef UDP_NO_CHECK6_RX
#define UDP_NO_CHECK6_RX 102
#endif

namespace sennit {
namespace {

// RFC 3168, 5: the two low bits of the type of service or traffic class.
constexpr int ECN_MASK = 3, ECN_CAPABLE = 2, ECN_EXPERIENCED = 3;

uint64_t microseconds_since(const timespec& then) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);  // what the kernel stamps with
  const int64_t passed_us =
      int64_t{now.tv_sec - then.tv_sec} * 1'000'000 + (int64_t{now.tv_nsec} - int64_t{then.tv_nsec}) / 1'000;
  return static_cast<uint64_t>(std::max<int64_t>(passed_us, 0));  // the clock may be set back
}

[[noreturn]] void raise(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::string advice(int error, const wire::Endpoint& local) {
  const std::string end = text_of(local);
  switch (error) {
    case EADDRNOTAVAIL:
      return "udp: " + end + " is not an address of this machine; list its addresses with `ip address`";
    case EADDRINUSE:
      return "udp: " + end + " is taken by another process; choose another port, or 0 for any";
    case EACCES:
    case EPERM:
      return "udp: no permission to bind " + end + "; choose a port above 1023";
    case EAFNOSUPPORT:
      return std::string("udp: this kernel has no ") + (local.is_ipv6 ? "IPv6" : "IPv4") + " for " + end +
             "; choose an address of the other family";
    default:
      return "udp: cannot bind " + end;
  }
}

void set_option(int fd, int level, int option, int value, const char* what) {
  if (setsockopt(fd, level, option, &value, sizeof value) != 0) raise(errno, std::string("udp: cannot set ") + what);
}

wire::Endpoint endpoint_of(const sockaddr* address) {
  wire::Endpoint end;
  end.is_ipv6 = address->sa_family == AF_INET6;
  if (end.is_ipv6) {
    const auto* in6 = reinterpret_cast<const sockaddr_in6*>(address);
    std::memcpy(end.address.data(), &in6->sin6_addr, 16);
    end.port = ntohs(in6->sin6_port);
  } else {
    const auto* in4 = reinterpret_cast<const sockaddr_in*>(address);
    std::memcpy(end.address.data(), &in4->sin_addr, 4);
    end.port = ntohs(in4->sin_port);
  }
  return end;
}

size_t set_buffer(int fd, int forced, int plain, size_t size_bytes) {
  const int wanted = static_cast<int>(size_bytes);
  if (setsockopt(fd, SOL_SOCKET, forced, &wanted, sizeof wanted) != 0)
    setsockopt(fd, SOL_SOCKET, plain, &wanted, sizeof wanted);  // clamped by the kernel, never refused
  int granted = 0;
  socklen_t granted_size = sizeof granted;
  getsockopt(fd, SOL_SOCKET, plain, &granted, &granted_size);
  return static_cast<size_t>(granted);
}

}  // namespace

SocketAddress::SocketAddress(const wire::Endpoint& endpoint) {
  if (endpoint.is_ipv6) {
    sockaddr_in6 in6{};
    in6.sin6_family = AF_INET6;
    in6.sin6_port = htons(endpoint.port);
    std::memcpy(&in6.sin6_addr, endpoint.address.data(), 16);
    std::memcpy(&storage, &in6, size_bytes = sizeof in6);
  } else {
    sockaddr_in in4{};
    in4.sin_family = AF_INET;
    in4.sin_port = htons(endpoint.port);
    std::memcpy(&in4.sin_addr, endpoint.address.data(), 4);
    std::memcpy(&storage, &in4, size_bytes = sizeof in4);
  }
}

UdpSocket::UdpSocket(const wire::Endpoint& local, bool shares_port) : local_(local) {
  const int family = local.is_ipv6 ? AF_INET6 : AF_INET;
  fd_ = socket(family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_UDP);
  if (fd_ < 0) raise(errno, advice(errno, local));
  try {
    // No fragments: RoCE forbids them. It also makes IPv4's identification predictable (docs/reference/wire.md).
    if (local.is_ipv6) {
      set_option(fd_, IPPROTO_IPV6, IPV6_V6ONLY, 1, "IPV6_V6ONLY");
      set_option(fd_, IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO, "IPV6_MTU_DISCOVER");
      // RoCE devices send no UDP checksum; the ICRC covers the packet (RFC 6935). We send one nevertheless: with
      // UDP_SEGMENT the kernel demands it, and the device computes it.
      set_option(fd_, IPPROTO_UDP, UDP_NO_CHECK6_RX, 1, "UDP_NO_CHECK6_RX");
    } else {
      set_option(fd_, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO, "IP_MTU_DISCOVER");
    }
    if (shares_port) set_option(fd_, SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");
    const SocketAddress address(local);
    if (bind(fd_, reinterpret_cast<const sockaddr*>(&address.storage), address.size_bytes) != 0)
      raise(errno, advice(errno, local));
    sockaddr_storage bound{};
    socklen_t bound_size = sizeof bound;
    if (getsockname(fd_, reinterpret_cast<sockaddr*>(&bound), &bound_size) != 0) raise(errno, "udp: getsockname");
    local_ = endpoint_of(reinterpret_cast<const sockaddr*>(&bound));
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

UdpSocket::~UdpSocket() {
  if (fd_ >= 0) ::close(fd_);
}

UdpSocket::UdpSocket(UdpSocket&& other) noexcept : fd_(std::exchange(other.fd_, -1)), local_(other.local_) {}

bool UdpSocket::connect(const SocketAddress& to) {
  return ::connect(fd_, reinterpret_cast<const sockaddr*>(&to.storage), to.size_bytes) == 0;
}

// connect(2): an address of AF_UNSPEC dissolves the association. The socket stays bound. But an IPv6 socket keeps its
// old destination (sk_v6_daddr, in Linux's __udp_disconnect), and gets no reports about packets to another address.
void UdpSocket::disconnect() {
  if (local_.is_ipv6 && renew()) return;
  sockaddr nowhere{};
  nowhere.sa_family = AF_UNSPEC;
  ::connect(fd_, &nowhere, sizeof nowhere);
}

// A thread that sends meanwhile uses the old socket or the new one.
bool UdpSocket::renew() {
  bool is_renewed = false;
  try {
    set_option(fd_, SOL_SOCKET, SO_REUSEADDR, 1, "SO_REUSEADDR");  // both must permit it
    UdpSocket fresh(local_, true);
    for (const int option : {IPV6_RECVERR, IPV6_TCLASS}) {
      int value = 0;
      socklen_t size = sizeof value;
      if (getsockopt(fd_, IPPROTO_IPV6, option, &value, &size) == 0)
        set_option(fresh.fd_, IPPROTO_IPV6, option, value, "an option again");
    }
    int doubled = 0;  // by the kernel, for its own needs
    socklen_t size = sizeof doubled;
    if (getsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &doubled, &size) == 0)
      fresh.set_send_buffer(static_cast<size_t>(doubled) / 2);
    is_renewed = dup3(fresh.fd_, fd_, O_CLOEXEC) >= 0;
  } catch (const std::system_error&) {
    // There are no more descriptors, or no memory. The old socket stays.
  }
  const int off = 0;
  setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &off, sizeof off);
  return is_renewed;
}

size_t UdpSocket::set_receive_buffer(size_t size_bytes) {
  return set_buffer(fd_, SO_RCVBUFFORCE, SO_RCVBUF, size_bytes);
}

size_t UdpSocket::set_send_buffer(size_t size_bytes) { return set_buffer(fd_, SO_SNDBUFFORCE, SO_SNDBUF, size_bytes); }

bool UdpSocket::enable_receive_offload() {
  const int on = 1;
  return setsockopt(fd_, IPPROTO_UDP, UDP_GRO, &on, sizeof on) == 0;
}

void UdpSocket::report_refusals() {
  if (local_.is_ipv6) {
    set_option(fd_, IPPROTO_IPV6, IPV6_RECVERR, 1, "IPV6_RECVERR");
  } else {
    set_option(fd_, IPPROTO_IP, IP_RECVERR, 1, "IP_RECVERR");
  }
}

void UdpSocket::announce_ecn() {
  if (local_.is_ipv6) {
    set_option(fd_, IPPROTO_IPV6, IPV6_TCLASS, ECN_CAPABLE, "IPV6_TCLASS");
  } else {
    set_option(fd_, IPPROTO_IP, IP_TOS, ECN_CAPABLE, "IP_TOS");
  }
}

void UdpSocket::report_arrivals() {
  if (local_.is_ipv6) {
    set_option(fd_, IPPROTO_IPV6, IPV6_RECVTCLASS, 1, "IPV6_RECVTCLASS");
  } else {
    set_option(fd_, IPPROTO_IP, IP_RECVTOS, 1, "IP_RECVTOS");
  }
  set_option(fd_, SOL_SOCKET, SO_TIMESTAMPNS, 1, "SO_TIMESTAMPNS");
}

bool UdpSocket::can_segment() const {
  int value = 0;
  socklen_t size = sizeof value;
  return getsockopt(fd_, IPPROTO_UDP, UDP_SEGMENT, &value, &size) == 0;
}

int send_segments(int fd, const SocketAddress* to, std::span<const iovec> pieces, size_t segment_bytes) {
  msghdr message{};
  if (to != nullptr) {
    message.msg_name = const_cast<sockaddr_storage*>(&to->storage);
    message.msg_namelen = to->size_bytes;
  }
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(uint16_t))];
  if (segment_bytes != 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* option = CMSG_FIRSTHDR(&message);
    option->cmsg_level = IPPROTO_UDP;
    option->cmsg_type = UDP_SEGMENT;
    option->cmsg_len = CMSG_LEN(sizeof(uint16_t));
    const auto value = static_cast<uint16_t>(segment_bytes);
    std::memcpy(CMSG_DATA(option), &value, sizeof value);
  }
  ssize_t sent;
  do {
    sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? errno : 0;
}

NetworkReports take_network_reports(int fd) {
  NetworkReports reports;
  for (;;) {
    sockaddr_storage destination{};
    alignas(cmsghdr) char control[512];
    // What the report quotes of our packet after the UDP header.
    std::array<std::byte, wire::BTH_BYTES> quoted;
    iovec piece{quoted.data(), quoted.size()};
    msghdr message{};
    message.msg_name = &destination;
    message.msg_namelen = sizeof destination;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    const ssize_t quoted_bytes = recvmsg(fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT);
    if (quoted_bytes < 0) return reports;
    for (cmsghdr* option = CMSG_FIRSTHDR(&message); option != nullptr; option = CMSG_NXTHDR(&message, option)) {
      const bool is_report = (option->cmsg_level == IPPROTO_IP && option->cmsg_type == IP_RECVERR) ||
                             (option->cmsg_level == IPPROTO_IPV6 && option->cmsg_type == IPV6_RECVERR);
      if (!is_report || option->cmsg_len < CMSG_LEN(sizeof(sock_extended_err))) continue;
      sock_extended_err report;
      std::memcpy(&report, CMSG_DATA(option), sizeof report);
      reports.error = static_cast<int>(report.ee_errno);
      if (report.ee_errno == EMSGSIZE) {
        reports.mtu_bytes = report.ee_info;
        reports.mtu_destination = endpoint_of(reinterpret_cast<const sockaddr*>(&destination));
      }
      if (report.ee_errno == ECONNREFUSED && static_cast<size_t>(quoted_bytes) == quoted.size())
        reports.refused.push_back(
            {endpoint_of(reinterpret_cast<const sockaddr*>(&destination)), wire::read_qpn(quoted)});
    }
  }
}

ReceivedBatch receive_segments(int fd, std::span<iovec> places) {
  ReceivedBatch batch;
  msghdr message{};
  message.msg_iov = places.data();
  message.msg_iovlen = places.size();
  alignas(cmsghdr) char control[2 * CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(timespec))];
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t received;
  do {
    received = recvmsg(fd, &message, MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  if (received < 0) {
    batch.error = errno;
    return batch;
  }
  batch.size_bytes = batch.segment_bytes = static_cast<size_t>(received);
  batch.is_truncated = (message.msg_flags & MSG_TRUNC) != 0;
  for (cmsghdr* option = CMSG_FIRSTHDR(&message); option != nullptr; option = CMSG_NXTHDR(&message, option)) {
    const auto is = [&](int level, int type) { return option->cmsg_level == level && option->cmsg_type == type; };
    if (is(IPPROTO_UDP, UDP_GRO)) {
      int value;
      std::memcpy(&value, CMSG_DATA(option), sizeof value);
      if (value > 0) batch.segment_bytes = static_cast<size_t>(value);
    } else if (is(IPPROTO_IPV6, IPV6_TCLASS)) {
      int value;
      std::memcpy(&value, CMSG_DATA(option), sizeof value);
      batch.is_ecn_marked = (value & ECN_MASK) == ECN_EXPERIENCED;
    } else if (is(IPPROTO_IP, IP_TOS)) {
      uint8_t value;
      std::memcpy(&value, CMSG_DATA(option), sizeof value);
      batch.is_ecn_marked = (value & ECN_MASK) == ECN_EXPERIENCED;
    } else if (is(SOL_SOCKET, SCM_TIMESTAMPNS)) {
      timespec value;
      std::memcpy(&value, CMSG_DATA(option), sizeof value);
      batch.waited_us = microseconds_since(value);
    }
  }
  return batch;
}

int peek_segments(int fd, std::span<std::byte> head, size_t& size_bytes) {
  ssize_t received;
  do {
    received = recv(fd, head.data(), head.size(), MSG_PEEK | MSG_DONTWAIT);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return errno;
  size_bytes = static_cast<size_t>(received);
  return 0;
}

}  // namespace sennit
