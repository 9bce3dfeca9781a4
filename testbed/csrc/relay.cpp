// SPDX-License-Identifier: Apache-2.0
#include "relay.hpp"

#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace sennit {
namespace {

// struct virtio_net_hdr. (linux/virtio_net.h is no C++.)
constexpr size_t OFFLOAD_HEADER_BYTES = 10;
constexpr size_t HEADER_BYTES = OFFLOAD_HEADER_BYTES + sizeof(ethhdr);
constexpr size_t PACKET_MAX_BYTES = HEADER_BYTES + 65'536;
// Addresses are 02:5e:00:00:<plane>:<host>.
constexpr size_t DESTINATION_PLANE = OFFLOAD_HEADER_BYTES + 4;
constexpr size_t SOURCE_PLANE = DESTINATION_PLANE + ETH_ALEN;
constexpr uint64_t STATISTICS_INTERVAL_NS = 50'000'000;
// A processor that sleeps takes about this long to come back, so the last part of a wait is spent awake.
constexpr uint64_t AWAKE_NS = 30'000;

uint64_t read_clock_ns(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return uint64_t(time.tv_sec) * 1'000'000'000 + uint64_t(time.tv_nsec);
}

void count(uint64_t& word, uint64_t amount = 1) {
  std::atomic_ref(word).store(word + amount, std::memory_order_release);  // this thread is the only writer
}

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// How long ago the packet came, by the kernel's time stamp. A clock that was set meanwhile must not hold packets back.
uint64_t age_ns(msghdr& message, uint64_t most_ns) {
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_TIMESTAMPNS) continue;
    timespec stamp;
    std::memcpy(&stamp, CMSG_DATA(part), sizeof stamp);
    const uint64_t came_ns = uint64_t(stamp.tv_sec) * 1'000'000'000 + uint64_t(stamp.tv_nsec);
    const uint64_t now_ns = read_clock_ns(CLOCK_REALTIME);
    return now_ns > came_ns ? std::min(now_ns - came_ns, most_ns) : 0;
  }
  return 0;
}

}  // namespace

Relay::Relay(int inlet, int outlet, int table, int stop, uint32_t first_port, uint32_t ports_a_plane)
    : inlet_(inlet),
      outlet_(outlet),
      stop_(stop),
      first_port_(first_port),
      ports_a_plane_(ports_a_plane),
      queue_(PACKET_MAX_BYTES) {
  void* const memory = mmap(nullptr, sizeof(RelayTable), PROT_READ | PROT_WRITE, MAP_SHARED, table, 0);
  if (memory == MAP_FAILED) fail("relay: cannot map the table");
  table_ = static_cast<RelayTable*>(memory);
}

Relay::~Relay() { munmap(table_, sizeof(RelayTable)); }

void Relay::run() {
  // Else the kernel wakes this thread up to 50 us late, to save power.
  prctl(PR_SET_TIMERSLACK, 1);
  for (;;) {
    // One by one, so that reading a burst makes no due packet late.
    const bool has_received = receive();
    send_due();
    const uint64_t now_ns = read_clock_ns(CLOCK_MONOTONIC);
    if (now_ns >= statistics_due_ns_) {
      read_statistics(now_ns);
      pollfd stop{stop_, POLLIN, 0};
      if (poll(&stop, 1, 0) > 0) return;
    }
    if (!has_received && !wait(now_ns)) return;
  }
}

// Returns false when it is time to stop.
bool Relay::wait(uint64_t now_ns) {
  uint64_t wake_ns = statistics_due_ns_;
  if (!queue_.empty()) wake_ns = std::min(wake_ns, queue_.due_ns() > AWAKE_NS ? queue_.due_ns() - AWAKE_NS : 0);
  if (wake_ns <= now_ns) return true;
  const uint64_t wait_ns = wake_ns - now_ns;
  const timespec timeout{time_t(wait_ns / 1'000'000'000), long(wait_ns % 1'000'000'000)};
  std::array<pollfd, 2> readable{{{inlet_, POLLIN, 0}, {stop_, POLLIN, 0}}};
  if (ppoll(readable.data(), readable.size(), &timeout, nullptr) < 0 && errno != EINTR) fail("relay: ppoll");
  return readable[1].revents == 0;
}

bool Relay::receive() {
  const std::span<std::byte> room = queue_.room();
  iovec piece{room.data(), room.size()};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(timespec))> control;
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t size_bytes = recvmsg(inlet_, &message, 0);
  if (size_bytes < 0) {
    // The interface may go down before the relay ends.
    if (errno == EAGAIN || errno == EINTR || errno == ENETDOWN) return false;
    fail("relay: cannot receive");
  }
  count(table_->received);
  if (size_t(size_bytes) < HEADER_BYTES || (message.msg_flags & MSG_TRUNC) != 0) {
    count(table_->lost);
    return true;
  }
  const auto plane = std::to_integer<size_t>(room[SOURCE_PLANE]);
  const auto host = std::to_integer<size_t>(room[SOURCE_PLANE + 1]);
  const uint64_t delay_ns = 1'000 * std::atomic_ref(table_->delay_us[plane][host]).load(std::memory_order_relaxed);
  // Two clocks are read, one after the other, so the difference may err by an interruption, but only to the late side.
  // Packets come in order, and stay so.
  const uint64_t age_ns = sennit::age_ns(message, delay_ns);
  came_ns_ = std::max(came_ns_, read_clock_ns(CLOCK_MONOTONIC) - age_ns);
  queue_.push(came_ns_ + delay_ns, size_t(size_bytes));
  return true;
}

void Relay::send_due() {
  while (!queue_.empty()) {
    const uint64_t now_ns = read_clock_ns(CLOCK_MONOTONIC);
    if (queue_.due_ns() > now_ns) return;
    const std::span<const std::byte> packet = queue_.front();
    sockaddr_ll port{};
    port.sll_family = AF_PACKET;
    port.sll_ifindex = int(first_port_ + std::to_integer<uint32_t>(packet[DESTINATION_PLANE]) * ports_a_plane_ +
                           std::to_integer<uint32_t>(packet[DESTINATION_PLANE + 1]));
    if (sendto(outlet_, packet.data(), packet.size(), 0, reinterpret_cast<const sockaddr*>(&port), sizeof port) >= 0) {
      count(table_->late_ns, now_ns - queue_.due_ns());
      count(table_->sent);
    } else {
      // The port is down, gone, or its queue is full: lost, as in a switch.
      if (errno != ENOBUFS && errno != ENETDOWN && errno != ENODEV && errno != ENXIO && errno != EAGAIN)
        fail("relay: cannot send");
      count(table_->lost);
    }
    queue_.pop();
  }
}

void Relay::read_statistics(uint64_t now_ns) {
  statistics_due_ns_ = now_ns + STATISTICS_INTERVAL_NS;
  tpacket_stats statistics{};
  socklen_t size_bytes = sizeof statistics;
  if (getsockopt(inlet_, SOL_PACKET, PACKET_STATISTICS, &statistics, &size_bytes) != 0) fail("relay: no statistics");
  count(table_->overrun, statistics.tp_drops);
}

}  // namespace sennit
