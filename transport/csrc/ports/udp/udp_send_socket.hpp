// SPDX-License-Identifier: Apache-2.0
// The sending sockets of a process, which its groups share: one for each path of a rail.
//
// A send takes the destination with it, and the kernel takes sends of several threads. So groups need not know of each
// other. Two things of a socket are common to its users. What the network reports goes to those that send to the
// destination in the report. And a socket with one destination is connected to it, so that the kernel looks up
// the route only once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ports/udp/udp_socket.hpp"

namespace sennit {

class UdpSendSocket {
 public:
  // What one user hears about its packets. The socket's lock is held where others write to it.
  struct Reports {
    // More reports than this wait only if nobody asks for them. The others are dropped: a user that asks later sends
    // again, and is told again.
    static constexpr size_t REFUSED_MAX_COUNT = 1'024;
    std::vector<RefusedPacket> refused;
    uint32_t path_mtu_bytes = 0;  // the newest; 0: none
    std::atomic<bool> has_refused{false};
  };

  explicit UdpSendSocket(UdpSocket socket) : socket_(std::move(socket)) {}
  UdpSendSocket(const UdpSendSocket&) = delete;
  UdpSendSocket& operator=(const UdpSendSocket&) = delete;

  const UdpSocket& socket() const { return socket_; }
  // The user may send there from now on, until it leaves.
  void add_destination(const wire::Endpoint& to, Reports& user);
  void leave(const Reports& user);
  // Makes one send of its user to a destination that it has declared. Returns 0 or errno. `calls` counts.
  int send(const SocketAddress& to, std::span<const iovec> pieces, size_t segment_bytes, uint64_t& calls);
  // Sends these messages, which have their addresses. Returns how many went, and `error` if not all did.
  size_t send_each(std::span<mmsghdr> messages, int& error, uint64_t& calls);
  // Asks the kernel for reports now, and passes them on. Otherwise a send that fails does.
  void read_reports();
  // Swaps what the user has been told since the last call.
  std::vector<RefusedPacket> take_refused(Reports& user);
  uint32_t path_mtu_bytes(const Reports& user);
  bool is_connected() const { return is_connected_.load(std::memory_order_relaxed); }

 private:
  struct Before {
    bool operator()(const wire::Endpoint& one, const wire::Endpoint& other) const {
      return std::tie(one.port, one.is_ipv6, one.address) < std::tie(other.port, other.is_ipv6, other.address);
    }
  };

  void aim();
  bool is_foreign(int error, int failure_count, uint64_t reports_before);

  UdpSocket socket_;
  std::mutex mutex_;
  std::map<wire::Endpoint, std::vector<Reports*>, Before> destinations_;  // with their users
  std::atomic<bool> is_connected_{false};
  std::atomic<uint64_t> report_count_{0};
};

// The sockets of the process (of_process.hpp).
class UdpSendSockets {
 public:
  // The socket for path number `path` from this address. Throws std::system_error with what to do.
  std::shared_ptr<UdpSendSocket> open(const std::string& address, const PortRange& ports, uint32_t path);

 private:
  using Key = std::tuple<std::string, uint16_t, uint16_t, uint32_t>;
  std::mutex mutex_;
  std::map<Key, std::weak_ptr<UdpSendSocket>> sockets_;
};

}  // namespace sennit
