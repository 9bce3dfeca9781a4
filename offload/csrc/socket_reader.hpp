// SPDX-License-Identifier: Apache-2.0
// A UDP socket, and the thread that passes its datagrams to a receiver.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>

#include "receiver.hpp"

namespace sennit::offload {

class SocketReader {
 public:
  // A literal IPv4 or IPv6 address; port 0 takes any. Throws std::invalid_argument for an invalid address, and
  // std::system_error (errno) that says what to do.
  SocketReader(std::shared_ptr<Receiver> receiver, const std::string& address, std::uint16_t port,
               std::size_t receive_buffer_bytes);
  ~SocketReader();
  SocketReader(const SocketReader&) = delete;
  SocketReader& operator=(const SocketReader&) = delete;

  // Ends the thread. Another call does nothing. Throws std::system_error (ETIMEDOUT) if it does not end in time: it is
  // then left behind with what it uses. The socket closes with the reader.
  void stop(std::chrono::milliseconds timeout);

  int fd() const;
  std::uint16_t port() const { return port_; }
  // The receive buffer that the kernel granted, which may be smaller than requested.
  std::size_t receive_buffer_bytes() const { return receive_buffer_bytes_; }
  // Datagrams that the kernel dropped because the buffer was full.
  std::uint64_t kernel_drops() const;
  // The errno that ended the thread early; 0 while it runs or after a stop.
  int error() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  std::future<void> ended_;
  std::uint16_t port_ = 0;
  std::size_t receive_buffer_bytes_ = 0;
};

}  // namespace sennit::offload
