// SPDX-License-Identifier: Apache-2.0
#include "ports/udp/udp_send_socket.hpp"

#include <algorithm>
#include <cerrno>

#include "ports/udp/udp_setup.hpp"

namespace sennit {
namespace {

constexpr size_t SEND_BUFFER_BYTES = 4 << 20;
// How often a send is tried that fails only because of other users' packets. Reports may come faster than a thread
// reads them, but not for long, because the kernel limits them.
constexpr int ATTEMPT_COUNT = 4;

bool is_full(int error) { return error == EAGAIN || error == ENOBUFS; }

}  // namespace

void UdpSendSocket::add_destination(const wire::Endpoint& to, Reports& user) {
  const std::lock_guard lock(mutex_);
  std::vector<Reports*>& users = destinations_[to];
  if (std::find(users.begin(), users.end(), &user) == users.end()) users.push_back(&user);
  aim();
}

void UdpSendSocket::leave(const Reports& user) {
  const std::lock_guard lock(mutex_);
  for (auto it = destinations_.begin(); it != destinations_.end();) {
    std::erase(it->second, &user);
    it = it->second.empty() ? destinations_.erase(it) : std::next(it);
  }
  aim();
}

// The lock is held. A send without an address that falls into the change fails with EDESTADDRREQ, or is lost.
void UdpSendSocket::aim() {
  const bool is_sole = destinations_.size() == 1;
  if (is_sole == is_connected()) return;
  if (is_sole) {
    is_connected_.store(socket_.connect(SocketAddress(destinations_.begin()->first)));
  } else {
    is_connected_.store(false);
    socket_.disconnect();
  }
}

// Whether a send that failed must be made again. A report about an earlier packet of any user makes the next send of
// any user fail, and the packet of that send has not left.
bool UdpSendSocket::is_foreign(int error, int failure_count, uint64_t reports_before) {
  if (is_full(error)) return false;
  read_reports();
  const bool is_never_of_this_send = error == ECONNREFUSED || error == EDESTADDRREQ;
  if (is_never_of_this_send) return failure_count < ATTEMPT_COUNT;
  return failure_count == 1 && report_count_.load() != reports_before;
}

int UdpSendSocket::send(const SocketAddress& to, std::span<const iovec> pieces, size_t segment_bytes, uint64_t& calls) {
  for (int failure_count = 0;;) {
    const uint64_t reports_before = report_count_.load(std::memory_order_relaxed);
    ++calls;
    const int error = send_segments(socket_.fd(), is_connected() ? nullptr : &to, pieces, segment_bytes);
    if (error == 0 || !is_foreign(error, ++failure_count, reports_before)) return error;
  }
}

size_t UdpSendSocket::send_each(std::span<mmsghdr> messages, int& error, uint64_t& calls) {
  size_t sent = 0;
  for (int failure_count = 0; sent < messages.size();) {
    const uint64_t reports_before = report_count_.load(std::memory_order_relaxed);
    ++calls;
    // It stops at the first that fails.
    const int result = sendmmsg(socket_.fd(), messages.data() + sent, static_cast<unsigned>(messages.size() - sent),
                                MSG_DONTWAIT | MSG_NOSIGNAL);
    if (result >= 0) {
      sent += static_cast<size_t>(result);
      continue;
    }
    if (errno == EINTR) continue;
    error = errno;
    if (!is_foreign(error, ++failure_count, reports_before)) return sent;
  }
  error = 0;
  return sent;
}

void UdpSendSocket::read_reports() {
  const std::lock_guard lock(mutex_);
  const NetworkReports reports = take_network_reports(socket_.fd());
  if (reports.error == 0) return;
  report_count_.fetch_add(1);
  for (const RefusedPacket& packet : reports.refused) {
    const auto found = destinations_.find(packet.destination);
    if (found == destinations_.end()) continue;
    for (Reports* user : found->second) {
      if (user->refused.size() == Reports::REFUSED_MAX_COUNT) continue;
      user->refused.push_back(packet);
      user->has_refused.store(true);
    }
  }
  if (reports.mtu_bytes == 0) return;
  if (const auto found = destinations_.find(reports.mtu_destination); found != destinations_.end())
    for (Reports* user : found->second) user->path_mtu_bytes = reports.mtu_bytes;
}

std::vector<RefusedPacket> UdpSendSocket::take_refused(Reports& user) {
  const std::lock_guard lock(mutex_);
  user.has_refused.store(false);
  return std::exchange(user.refused, {});
}

uint32_t UdpSendSocket::path_mtu_bytes(const Reports& user) {
  const std::lock_guard lock(mutex_);
  return user.path_mtu_bytes;
}

std::shared_ptr<UdpSendSocket> UdpSendSockets::open(const std::string& address, const PortRange& ports, uint32_t path) {
  const std::lock_guard lock(mutex_);
  std::weak_ptr<UdpSendSocket>& place = sockets_[{address, ports.first, ports.last, path}];
  if (std::shared_ptr<UdpSendSocket> known = place.lock()) return known;
  UdpSocket socket = open_sender(address, ports);
  socket.set_send_buffer(SEND_BUFFER_BYTES);
  socket.report_refusals();
  socket.announce_ecn();
  auto fresh = std::make_shared<UdpSendSocket>(std::move(socket));
  place = fresh;
  return fresh;
}

}  // namespace sennit
