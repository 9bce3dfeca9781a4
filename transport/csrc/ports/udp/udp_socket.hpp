// SPDX-License-Identifier: Apache-2.0
// UDP sockets as the udp port needs them: bound to one address, with segmentation offload both ways.
//
// Linux: UDP_SEGMENT (4.18) sends up to 64 packets in one call, UDP_GRO (5.0) receives them in one. Set-up throws
// std::system_error (errno) with what to do. The calls of the data path return errors.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "wire/endpoint.hpp"
#include "wire/packet.hpp"

namespace sennit {

// A send must fit one IPv6 datagram of 65,535 bytes; the kernel takes at most 64 segments (128 from 6.9 on).
inline constexpr size_t SEND_MAX_BYTES = 65'000;
inline constexpr size_t RECEIVE_MAX_BYTES = 65'535;

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size_bytes = 0;
  explicit SocketAddress(const wire::Endpoint& endpoint);
};

// UDP ports from `first` to `last`. first 0: no limits.
struct PortRange {
  uint16_t first = 0, last = 0;
};

class UdpSocket {
 public:
  // Binds. Port 0 takes any port.
  explicit UdpSocket(const wire::Endpoint& local) : UdpSocket(local, false) {}
  ~UdpSocket();
  UdpSocket(UdpSocket&& other) noexcept;
  UdpSocket& operator=(UdpSocket&&) = delete;

  int fd() const { return fd_; }
  const wire::Endpoint& local() const { return local_; }  // with the port that bind chose
  // Asks for buffer room, as root beyond the system's limit. Returns the bytes of kernel memory granted.
  size_t set_receive_buffer(size_t size_bytes);
  size_t set_send_buffer(size_t size_bytes);
  // Lets one recvmsg return several packets. False if the kernel cannot.
  bool enable_receive_offload();
  // All packets will go there, so the kernel looks up the route only once. False if it has no route now.
  bool connect(const SocketAddress& to);
  // Packets may go anywhere again.
  void disconnect();
  // A destination that refuses packets makes the next send fail with ECONNREFUSED. See take_network_reports().
  void report_refusals();
  // Packets carry ECT(0): routers may mark them instead of dropping them (RFC 3168).
  void announce_ecn();
  // receive_segments() then tells whether a batch was marked, and how long it waited in this host.
  void report_arrivals();
  // Whether the kernel takes UDP_SEGMENT on this socket. (The device may still refuse it at send: EIO.)
  bool can_segment() const;

 private:
  // `shares_port`: with a socket that permits it.
  UdpSocket(const wire::Endpoint& local, bool shares_port);
  // Puts a socket that was never connected in the place of this one. False if there is none.
  bool renew();

  int fd_ = -1;
  wire::Endpoint local_;
};

// Sends `pieces` as packets of `segment_bytes` (the last may be shorter) in one call; 0: as one packet.
// `to` null: to where the socket is connected. Returns 0 or errno.
int send_segments(int fd, const SocketAddress* to, std::span<const iovec> pieces, size_t segment_bytes);

// A packet of ours that came back, as the ICMP report quotes it.
struct RefusedPacket {
  wire::Endpoint destination;
  uint32_t qpn;
};

// What the network and this host's kernel said about packets of a socket.
struct NetworkReports {
  // Packets that came back (ICMP port unreachable), because nobody listens there any more. The kernel has matched the
  // report with the socket's addresses and ports, which a stranger may guess. But the queue pair that it quotes is
  // random and known only to the two ends (RFC 5927, 4.1 and 4.2).
  std::vector<RefusedPacket> refused;
  int error = 0;           // errno of the newest report, of any kind; 0: there was none
  uint32_t mtu_bytes = 0;  // with EMSGSIZE: the path's MTU in the newest such report
  wire::Endpoint mtu_destination;
};
// Returns the reports since the last call. Needs report_refusals().
NetworkReports take_network_reports(int fd);

struct ReceivedBatch {
  size_t size_bytes = 0;     // of all packets together
  size_t segment_bytes = 0;  // size of each packet but the last
  bool is_truncated = false;
  bool is_ecn_marked = false;  // the kernel joins packets of one mark only
  uint64_t waited_us = 0;      // time since the kernel had it
  int error = 0;               // errno; EAGAIN when nothing is there
};
ReceivedBatch receive_segments(int fd, std::span<iovec> places);
// Copies the first bytes of the next batch, and leaves the batch in the queue. Returns 0 or errno.
int peek_segments(int fd, std::span<std::byte> head, size_t& size_bytes);

}  // namespace sennit
