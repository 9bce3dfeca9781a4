// SPDX-License-Identifier: Apache-2.0
// Server: a store of leaves behind UDP sockets. One thread.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "aggregation/store.hpp"

namespace sennit::aggregation {

class Server {
 public:
  // `addresses`: literal IPv4 or IPv6 addresses of this machine, or none: all of them. Port 0 takes any port, one for
  // all addresses. `arena`: zeroed memory of the caller's that outlives the server; empty: `memory_bytes` of its own.
  // Throws std::invalid_argument, and std::system_error (errno) that says what to do.
  Server(const std::vector<std::string>& addresses, uint16_t port, size_t memory_bytes,
         std::span<std::byte> arena = {});
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Answers for this long. A signal may end it earlier.
  void run(std::chrono::microseconds duration);

  uint16_t port() const { return port_; }
  const aggregation_counters& counters() const { return store_.counters(); }
  std::vector<Store::Job> jobs() const { return store_.jobs(); }
  // Datagrams that the kernel dropped because a receive buffer was full.
  uint64_t kernel_drops() const;

 private:
  class Memory;
  class Socket;
  class Messages;

  bool add_socket(const std::string& address, uint16_t port, bool may_lack_family);
  void take_from(const Socket& socket);
  void send_answers();
  Socket* socket_for(const Endpoint& to);
  size_t send_segments(Socket& socket, std::span<const size_t> answers);

  std::unique_ptr<Memory> memory_;
  Store store_;
  std::vector<std::unique_ptr<Socket>> sockets_;
  std::unique_ptr<Messages> messages_;
  // Programs want each datagram by itself: UDP_GRO would make the kernel join them before.
  const bool has_programs_;
  uint16_t port_ = 0;
  Answers answers_;
  std::vector<size_t> order_;
  std::chrono::steady_clock::time_point next_second_;
};

}  // namespace sennit::aggregation
