// SPDX-License-Identifier: Apache-2.0
#include "socket_reader.hpp"

#include <arpa/inet.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "sennit/own_thread.hpp"

// Linux's uapi number, for C libraries that lack it.
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace sennit::offload {
namespace {

constexpr unsigned MESSAGES = 64;  // messages per recvmmsg
constexpr std::size_t DATAGRAM_MAX_BYTES = 65'535;
// Not a power of two, or the headers of all datagrams would fall into one set of the first-level cache.
constexpr std::size_t PLACE_BYTES = DATAGRAM_MAX_BYTES + 1 + 3 * 64;

[[noreturn]] void raise(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), "cpu: " + what);
}

class Descriptor {
 public:
  Descriptor(int fd, const char* what) : fd_(fd) {
    if (fd < 0) raise(errno, what);
  }
  ~Descriptor() { ::close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

struct Address {
  sockaddr_storage storage{};
  socklen_t size_bytes = 0;

  Address(const std::string& text, std::uint16_t port) {
    sockaddr_in in4{};
    sockaddr_in6 in6{};
    if (inet_pton(AF_INET, text.c_str(), &in4.sin_addr) == 1) {
      in4.sin_family = AF_INET;
      in4.sin_port = htons(port);
      std::memcpy(&storage, &in4, size_bytes = sizeof in4);
    } else if (inet_pton(AF_INET6, text.c_str(), &in6.sin6_addr) == 1) {
      in6.sin6_family = AF_INET6;
      in6.sin6_port = htons(port);
      std::memcpy(&storage, &in6, size_bytes = sizeof in6);
    } else {
      throw std::invalid_argument("cpu: \"" + text +
                                  "\" is not an IPv4 or IPv6 address (write 192.0.2.1 or 2001:db8::1)");
    }
  }
};

std::string advice(int error, const std::string& end) {
  switch (error) {
    case EADDRNOTAVAIL:
      return end + " is not an address of this machine; `ip address` lists them, and 0.0.0.0 and :: are all of them";
    case EADDRINUSE:
      return end + " is taken by another process; choose another port, or 0 for any";
    case EACCES:
      return "no permission to bind " + end + "; choose a port above 1023";
    default:
      return "cannot bind " + end;
  }
}

// The buffers of one recvmmsg, and its results.
class Messages {
 public:
  Messages() : bytes_(MESSAGES * PLACE_BYTES) {
    for (unsigned n = 0; n < MESSAGES; n++) {
      places_[n] = {bytes_.data() + n * PLACE_BYTES, DATAGRAM_MAX_BYTES};
      headers_[n].msg_hdr.msg_iov = &places_[n];
      headers_[n].msg_hdr.msg_iovlen = 1;
    }
  }

  // The datagrams, valid until the next call, or an errno.
  int receive(int fd, std::vector<Receiver::Datagram>& datagrams) {
    for (unsigned n = 0; n < MESSAGES; n++) {
      headers_[n].msg_hdr.msg_control = controls_[n].bytes;
      headers_[n].msg_hdr.msg_controllen = sizeof controls_[n].bytes;
    }
    const int count = recvmmsg(fd, headers_.data(), MESSAGES, MSG_DONTWAIT, nullptr);
    if (count < 0) return errno;
    for (int n = 0; n < count; n++) split(headers_[static_cast<unsigned>(n)], datagrams);
    return 0;
  }

 private:
  // Datagrams of one sender and size arrive as one message (UDP_GRO, Linux 5.0); the last may be shorter.
  static void split(const mmsghdr& message, std::vector<Receiver::Datagram>& datagrams) {
    Receiver::Datagram rest(static_cast<const std::uint8_t*>(message.msg_hdr.msg_iov->iov_base), message.msg_len);
    std::size_t segment_bytes = rest.size();
    for (const cmsghdr* option = CMSG_FIRSTHDR(&message.msg_hdr); option != nullptr;
         option = CMSG_NXTHDR(const_cast<msghdr*>(&message.msg_hdr), const_cast<cmsghdr*>(option))) {
      if (option->cmsg_level != IPPROTO_UDP || option->cmsg_type != UDP_GRO) continue;
      int value;
      std::memcpy(&value, CMSG_DATA(option), sizeof value);
      if (value > 0) segment_bytes = static_cast<std::size_t>(value);
    }
    do {  // once for an empty datagram too
      datagrams.push_back(rest.first(std::min(segment_bytes, rest.size())));
      rest = rest.subspan(datagrams.back().size());
    } while (!rest.empty());
  }

  struct alignas(cmsghdr) Control {
    char bytes[CMSG_SPACE(sizeof(int))];
  };
  std::vector<std::uint8_t> bytes_;
  std::array<iovec, MESSAGES> places_{};
  std::array<Control, MESSAGES> controls_{};
  std::array<mmsghdr, MESSAGES> headers_{};
};

}  // namespace

// The thread's state, which may outlive the reader.
struct SocketReader::Shared {
  std::shared_ptr<Receiver> receiver;
  Descriptor socket, wake;
  std::atomic<bool> is_stopped{false};
  std::atomic<int> error{0};

  Shared(std::shared_ptr<Receiver> to, int family)
      : receiver(std::move(to)),
        socket(::socket(family, SOCK_DGRAM | SOCK_CLOEXEC, IPPROTO_UDP), "socket"),
        wake(eventfd(0, EFD_CLOEXEC), "eventfd") {}

  void run() {
    Messages messages;
    std::vector<Receiver::Datagram> datagrams;
    while (!is_stopped.load(std::memory_order_relaxed)) {
      datagrams.clear();
      const int found = messages.receive(socket.get(), datagrams);
      if (found == 0) {
        receiver->take(datagrams);
      } else if (found == EAGAIN || found == EINTR) {
        std::array<pollfd, 2> events{{{socket.get(), POLLIN, 0}, {wake.get(), POLLIN, 0}}};
        poll(events.data(), events.size(), -1);
      } else {
        error = found;
        return;
      }
    }
  }
};

SocketReader::SocketReader(std::shared_ptr<Receiver> receiver, const std::string& address, std::uint16_t port,
                           std::size_t receive_buffer_bytes) {
  Address local(address, port);
  shared_ = std::make_shared<Shared>(std::move(receiver), local.storage.ss_family);
  const int fd = shared_->socket.get(), on = 1;
  if (local.storage.ss_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof on);  // without it each datagram is one message
  const auto wanted = static_cast<int>(receive_buffer_bytes);
  if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &wanted, sizeof wanted) != 0)
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &wanted, sizeof wanted);  // the kernel clamps it and never refuses
  int granted = 0;
  socklen_t size = sizeof granted;
  if (getsockopt(fd, SOL_SOCKET, SO_RCVBUF, &granted, &size) != 0) raise(errno, "SO_RCVBUF");
  receive_buffer_bytes_ = static_cast<std::size_t>(granted) / 2;  // socket(7): the kernel doubles it for its own use
  if (bind(fd, reinterpret_cast<const sockaddr*>(&local.storage), local.size_bytes) != 0)
    raise(errno, advice(errno, address + " port " + std::to_string(port)));
  size = sizeof local.storage;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&local.storage), &size) != 0) raise(errno, "getsockname");
  const bool is_ipv6 = local.storage.ss_family == AF_INET6;
  port_ = ntohs(is_ipv6 ? reinterpret_cast<const sockaddr_in6&>(local.storage).sin6_port
                        : reinterpret_cast<const sockaddr_in&>(local.storage).sin_port);
  std::packaged_task<void()> task([shared = shared_]() mutable {
    begin_thread("sennit-feed");
    shared->run();
    shared.reset();  // before `ended_` is set, because the socket closes with the reader
  });
  ended_ = task.get_future();
  std::thread(std::move(task)).detach();  // `ended_` can be waited for with a deadline, `join` cannot
}

SocketReader::~SocketReader() {
  try {
    stop(std::chrono::seconds(5));
  } catch (const std::system_error&) {  // the thread keeps what it uses
  }
}

void SocketReader::stop(std::chrono::milliseconds timeout) {
  if (!ended_.valid()) return;
  shared_->is_stopped = true;
  const std::uint64_t one = 1;
  if (write(shared_->wake.get(), &one, sizeof one) < 0) raise(errno, "eventfd");
  const bool is_ended = ended_.wait_for(timeout) == std::future_status::ready;
  ended_ = {};
  if (!is_ended) raise(ETIMEDOUT, "the receiving thread did not end within " + std::to_string(timeout.count()) + " ms");
}

int SocketReader::fd() const { return shared_->socket.get(); }

std::uint64_t SocketReader::kernel_drops() const {
  std::array<std::uint32_t, SK_MEMINFO_VARS> info{};
  socklen_t size = sizeof info;
  if (getsockopt(fd(), SOL_SOCKET, SO_MEMINFO, info.data(), &size) != 0) raise(errno, "SO_MEMINFO");
  return info[SK_MEMINFO_DROPS];
}

int SocketReader::error() const { return shared_->error; }

}  // namespace sennit::offload
