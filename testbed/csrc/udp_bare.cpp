// SPDX-License-Identifier: Apache-2.0
#include "udp_bare.hpp"

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <stdexcept>

#include "wire/packet.hpp"

namespace sennit {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t SEGMENT_BYTES = wire::DATA_HEADER_BYTES + wire::PAYLOAD_MAX_BYTES + wire::ICRC_BYTES;
constexpr size_t BATCH_BYTES = SEND_MAX_BYTES / SEGMENT_BYTES * SEGMENT_BYTES;
constexpr size_t BUFFER_BYTES = 8 << 20;

}  // namespace

UdpBare::UdpBare(const std::string& local_address) : socket_(wire::parse_endpoint(local_address, 0)) {
  // Half of the granted memory is the kernel's own bookkeeping, and two windows may be in flight (see below).
  window_bytes_ = socket_.set_receive_buffer(BUFFER_BYTES) / 8;
  socket_.set_send_buffer(BUFFER_BYTES);
  if (!socket_.enable_receive_offload()) throw std::runtime_error("udp: this kernel has no UDP_GRO (Linux 5.0)");
}

double UdpBare::exchange(const std::string& peer_address, uint16_t peer_port, uint64_t size_bytes, double timeout_s) {
  source_.resize(size_bytes, std::byte{0x5A});
  destination_.resize(size_bytes + RECEIVE_MAX_BYTES);
  const SocketAddress peer(wire::parse_endpoint(peer_address, peer_port));
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  const auto check_deadline = [&] {
    if (Clock::now() > deadline)
      throw std::runtime_error("bare udp exchange: deadline passed (a packet was lost, or no peer)");
  };
  const auto send_greeting = [&](std::byte kind) {
    iovec piece{&kind, 1};
    send_segments(socket_.fd(), &peer, std::span(&piece, 1), 0);
  };
  constexpr std::byte HELLO{1}, SEEN{2};

  // Send greetings of one byte until each side has seen the other's. Data that overtakes them counts at once.
  uint64_t sent_bytes = 0, received_bytes = 0;
  const auto receive = [&](bool& greeted) {
    iovec place{destination_.data() + received_bytes, RECEIVE_MAX_BYTES};
    const ReceivedBatch batch = receive_segments(socket_.fd(), std::span(&place, 1));
    if (batch.error != 0) return false;
    if (batch.segment_bytes == 1) {
      if (static_cast<std::byte*>(place.iov_base)[0] == HELLO) send_greeting(SEEN);
      greeted = true;
    } else {
      greeted = true;
      received_bytes += batch.size_bytes;
    }
    return true;
  };
  for (bool greeted = false; !greeted;) {
    send_greeting(HELLO);
    pollfd readable{socket_.fd(), POLLIN, 0};
    poll(&readable, 1, 1);
    receive(greeted);
    check_deadline();
  }

  const auto start = Clock::now();
  bool greeted = true;
  while (sent_bytes < size_bytes || received_bytes < size_bytes) {
    bool moved = false;
    // The peer keeps the same rule, so at most twice the window waits in either socket.
    if (sent_bytes < size_bytes && sent_bytes < received_bytes + window_bytes_) {
      iovec piece{source_.data() + sent_bytes, std::min<uint64_t>(BATCH_BYTES, size_bytes - sent_bytes)};
      if (send_segments(socket_.fd(), &peer, std::span(&piece, 1), SEGMENT_BYTES) == 0) {
        sent_bytes += piece.iov_len;
        moved = true;
      }
    }
    if (received_bytes < size_bytes) moved |= receive(greeted);
    if (!moved) {
      pollfd readable{socket_.fd(), POLLIN, 0};
      poll(&readable, 1, 1);
      check_deadline();
    }
  }
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace sennit
