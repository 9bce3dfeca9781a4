// SPDX-License-Identifier: Apache-2.0
#include "aggregation/server.hpp"

#include <arpa/inet.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <system_error>

// Linux's uapi numbers, for C libraries that lack them.
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace sennit::aggregation {
namespace {

constexpr unsigned MESSAGES = 32;
constexpr size_t MESSAGE_BYTES = 65'536 + 3 * 64;  // no power of two, or all would share one set of the cache
constexpr size_t SEGMENTS_MAX = 44;                // 44 packets of 1,448 bytes are less than an IP datagram may have
constexpr int SOCKET_BUFFER_BYTES = 8 << 20;
// A network that takes nothing for so long has lost what was for it.
constexpr int SEND_TIMEOUT_MS = 100;

[[noreturn]] void raise(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// Addresses of the datagram in `message`, which came from `from`.
Endpoint endpoint_of(const sockaddr_storage& from, const msghdr& message) {
  Endpoint found{};
  if (from.ss_family == AF_INET6) {
    const auto& in6 = reinterpret_cast<const sockaddr_in6&>(from);
    found.family = 6;
    found.port = in6.sin6_port;
    found.interface = in6.sin6_scope_id;
    std::memcpy(found.address, &in6.sin6_addr, sizeof found.address);
  } else {
    const auto& in4 = reinterpret_cast<const sockaddr_in&>(from);
    found.family = 4;
    found.port = in4.sin_port;
    std::memcpy(found.address, &in4.sin_addr, sizeof in4.sin_addr);
  }
  for (cmsghdr* option = CMSG_FIRSTHDR(&message); option != nullptr;
       option = CMSG_NXTHDR(const_cast<msghdr*>(&message), option)) {
    if (option->cmsg_level == IPPROTO_IPV6 && option->cmsg_type == IPV6_PKTINFO) {
      in6_pktinfo info;
      std::memcpy(&info, CMSG_DATA(option), sizeof info);
      std::memcpy(found.own_address, &info.ipi6_addr, sizeof info.ipi6_addr);
    } else if (option->cmsg_level == IPPROTO_IP && option->cmsg_type == IP_PKTINFO) {
      in_pktinfo info;
      std::memcpy(&info, CMSG_DATA(option), sizeof info);
      // Of a broadcast, this is not the destination, from which nothing can be sent.
      std::memcpy(found.own_address, &info.ipi_spec_dst, sizeof info.ipi_spec_dst);
    }
  }
  return found;
}

socklen_t write_address(const Endpoint& to, sockaddr_storage& out) {
  out = {};
  if (to.family == 6) {
    auto& in6 = reinterpret_cast<sockaddr_in6&>(out);
    in6.sin6_family = AF_INET6;
    in6.sin6_port = to.port;
    std::memcpy(&in6.sin6_addr, to.address, sizeof in6.sin6_addr);
    if (IN6_IS_ADDR_LINKLOCAL(&in6.sin6_addr)) in6.sin6_scope_id = to.interface;
    return sizeof in6;
  }
  auto& in4 = reinterpret_cast<sockaddr_in&>(out);
  in4.sin_family = AF_INET;
  in4.sin_port = to.port;
  std::memcpy(&in4.sin_addr, to.address, sizeof in4.sin_addr);
  return sizeof in4;
}

struct alignas(cmsghdr) Control {
  char bytes[CMSG_SPACE(sizeof(in6_pktinfo)) + CMSG_SPACE(sizeof(in_pktinfo)) + CMSG_SPACE(sizeof(int))];
};

// Appends a control message.
template <class Value>
void append(msghdr& message, int level, int type, const Value& value) {
  const size_t before = message.msg_controllen;
  message.msg_controllen += CMSG_SPACE(sizeof value);
  auto* option = reinterpret_cast<cmsghdr*>(static_cast<char*>(message.msg_control) + before);
  option->cmsg_level = level;
  option->cmsg_type = type;
  option->cmsg_len = CMSG_LEN(sizeof value);
  std::memcpy(CMSG_DATA(option), &value, sizeof value);
}

// So that an answer has the source to which the rank has sent.
void append_source(msghdr& message, const Endpoint& to) {
  if (to.family == 6) {
    in6_pktinfo info{};
    std::memcpy(&info.ipi6_addr, to.own_address, sizeof info.ipi6_addr);
    append(message, IPPROTO_IPV6, IPV6_PKTINFO, info);
  } else {
    in_pktinfo info{};
    std::memcpy(&info.ipi_spec_dst, to.own_address, sizeof info.ipi_spec_dst);
    append(message, IPPROTO_IP, IP_PKTINFO, info);
  }
}

}  // namespace

class Server::Memory {
 public:
  Memory(size_t size_bytes, std::span<std::byte> given) : given_(given) {
    if (!given.empty()) return;
    size_bytes = std::max(size_bytes, size_t{1});  // the store refuses it
    void* found = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) raise(errno, "memory of " + std::to_string(size_bytes) + " bytes");
    own_ = {static_cast<std::byte*>(found), size_bytes};
  }
  ~Memory() {
    if (!own_.empty()) munmap(own_.data(), own_.size());
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::span<std::byte> bytes() const { return own_.empty() ? given_ : own_; }

 private:
  std::span<std::byte> own_, given_;
};

class Server::Socket {
 public:
  Socket(int family, bool joins_datagrams)
      : joins_datagrams_(joins_datagrams),
        fd_(::socket(family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_UDP)) {
    if (fd_ < 0) raise(errno, "socket");
  }
  ~Socket() { ::close(fd_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  // Returns the port.
  uint16_t bind(const Endpoint& local, const std::string& shown) {
    const int on = 1;
    const bool is_ipv6 = local.family == 6;
    local_ = local;
    if (is_ipv6) {
      setsockopt(fd_, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
      setsockopt(fd_, IPPROTO_IPV6, IPV6_RECVPKTINFO, &on, sizeof on);
    } else {
      setsockopt(fd_, IPPROTO_IP, IP_PKTINFO, &on, sizeof on);
    }
    if (joins_datagrams_) setsockopt(fd_, IPPROTO_UDP, UDP_GRO, &on, sizeof on);
    for (const auto& [forced, plain] : {std::pair{SO_RCVBUFFORCE, SO_RCVBUF}, std::pair{SO_SNDBUFFORCE, SO_SNDBUF}})
      if (setsockopt(fd_, SOL_SOCKET, forced, &SOCKET_BUFFER_BYTES, sizeof SOCKET_BUFFER_BYTES) != 0)
        setsockopt(fd_, SOL_SOCKET, plain, &SOCKET_BUFFER_BYTES, sizeof SOCKET_BUFFER_BYTES);
    sockaddr_storage storage;
    const socklen_t size_bytes = write_address(local, storage);
    if (::bind(fd_, reinterpret_cast<const sockaddr*>(&storage), size_bytes) != 0) {
      if (errno == EADDRINUSE) raise(errno, shown + " is taken by another process; choose another port, or 0 for any");
      if (errno == EADDRNOTAVAIL) raise(errno, shown + " is not an address of this machine; `ip address` lists them");
      raise(errno, "cannot bind " + shown);
    }
    socklen_t size = sizeof storage;
    if (getsockname(fd_, reinterpret_cast<sockaddr*>(&storage), &size) != 0) raise(errno, "getsockname");
    return ntohs(is_ipv6 ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                         : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
  }

  bool sends_from(const Endpoint& to) const {
    constexpr uint32_t ANY[4] = {};
    return local_.family == to.family && (std::memcmp(local_.address, ANY, sizeof ANY) == 0 ||
                                          std::memcmp(local_.address, to.own_address, sizeof ANY) == 0);
  }

  // Sends, and waits for room if there is none. Returns 0 or an errno.
  int send(const msghdr& message) const {
    if (sendmsg(fd_, &message, 0) >= 0) return 0;
    if (errno != EAGAIN) return errno;
    pollfd event{fd_, POLLOUT, 0};
    if (poll(&event, 1, SEND_TIMEOUT_MS) <= 0) return EAGAIN;
    return sendmsg(fd_, &message, 0) >= 0 ? 0 : errno;
  }

  int fd() const { return fd_; }
  bool can_segment = true;

 private:
  const bool joins_datagrams_;
  const int fd_;
  Endpoint local_{};
};

// The buffers of one recvmmsg.
class Server::Messages {
 public:
  Messages() : bytes_(MESSAGES * MESSAGE_BYTES) {
    for (unsigned n = 0; n < MESSAGES; ++n) {
      places_[n] = {bytes_.data() + n * MESSAGE_BYTES, 65'535};
      headers_[n].msg_hdr.msg_iov = &places_[n];
      headers_[n].msg_hdr.msg_iovlen = 1;
      headers_[n].msg_hdr.msg_name = &addresses_[n];
    }
  }

  // Returns how many came.
  unsigned receive(int fd) {
    for (unsigned n = 0; n < MESSAGES; ++n) {
      headers_[n].msg_hdr.msg_namelen = sizeof addresses_[n];
      headers_[n].msg_hdr.msg_control = controls_[n].bytes;
      headers_[n].msg_hdr.msg_controllen = sizeof controls_[n].bytes;
    }
    const int count = recvmmsg(fd, headers_.data(), MESSAGES, MSG_DONTWAIT, nullptr);
    return count < 0 ? 0 : static_cast<unsigned>(count);
  }

  // Calls `take(datagram, from)` for each datagram of a message: those of one sender may come as one.
  template <class Take>
  void each_datagram(unsigned number, Take take) {
    const mmsghdr& message = headers_[number];
    std::span<const std::byte> rest(bytes_.data() + number * MESSAGE_BYTES, message.msg_len);
    size_t segment_bytes = rest.size();
    for (cmsghdr* option = CMSG_FIRSTHDR(&message.msg_hdr); option != nullptr;
         option = CMSG_NXTHDR(const_cast<msghdr*>(&message.msg_hdr), option)) {
      if (option->cmsg_level != IPPROTO_UDP || option->cmsg_type != UDP_GRO) continue;
      int value;
      std::memcpy(&value, CMSG_DATA(option), sizeof value);
      if (value > 0) segment_bytes = static_cast<size_t>(value);
    }
    const Endpoint from = endpoint_of(addresses_[number], message.msg_hdr);
    do {  // once for an empty datagram, too
      const auto datagram = rest.first(std::min(segment_bytes, rest.size()));
      take(datagram, from);
      rest = rest.subspan(datagram.size());
    } while (!rest.empty());
  }

 private:
  std::vector<std::byte> bytes_;
  std::array<iovec, MESSAGES> places_{};
  std::array<sockaddr_storage, MESSAGES> addresses_{};
  std::array<Control, MESSAGES> controls_{};
  std::array<mmsghdr, MESSAGES> headers_{};
};

Server::Server(const std::vector<std::string>& addresses, uint16_t port, size_t memory_bytes,
               std::span<std::byte> arena)
    : memory_(std::make_unique<Memory>(memory_bytes, arena)),
      store_(memory_->bytes()),
      messages_(std::make_unique<Messages>()),
      has_programs_(!arena.empty()),
      port_(port),
      next_second_(std::chrono::steady_clock::now() + std::chrono::seconds(1)) {
  for (const std::string& address : addresses) add_socket(address, port_, false);
  // A kernel may lack one of the families.
  if (addresses.empty()) {
    const bool has_ipv6 = add_socket("::", port_, true);
    add_socket("0.0.0.0", port_, has_ipv6);
  }
}

Server::~Server() = default;

bool Server::add_socket(const std::string& address, uint16_t port, bool may_lack_family) {
  Endpoint local{};
  local.port = htons(port);
  if (inet_pton(AF_INET6, address.c_str(), local.address) == 1)
    local.family = 6;
  else if (inet_pton(AF_INET, address.c_str(), local.address) == 1)
    local.family = 4;
  else
    throw std::invalid_argument("\"" + address + "\" is not an IPv4 or IPv6 address (write 192.0.2.1 or 2001:db8::1)");
  try {
    auto socket = std::make_unique<Socket>(local.family == 6 ? AF_INET6 : AF_INET, !has_programs_);
    port_ = socket->bind(local, address + " port " + std::to_string(port));
    sockets_.push_back(std::move(socket));
  } catch (const std::system_error& error) {
    const int code = error.code().value();
    if (may_lack_family && (code == EAFNOSUPPORT || code == EADDRNOTAVAIL)) return false;
    throw;
  }
  return true;
}

void Server::run(std::chrono::microseconds duration) {
  const auto end = std::chrono::steady_clock::now() + duration;
  std::vector<pollfd> events;
  for (const auto& socket : sockets_) events.push_back({socket->fd(), POLLIN, 0});
  for (;;) {
    const auto now = std::chrono::steady_clock::now();
    for (; now >= next_second_; next_second_ += std::chrono::seconds(1)) store_.second_passed();
    if (now >= end) return;
    const auto until = std::min(end, next_second_) - now;
    const auto wait_ms = std::chrono::ceil<std::chrono::milliseconds>(until).count();
    const int ready = poll(events.data(), events.size(), static_cast<int>(wait_ms));
    if (ready < 0) {
      if (errno == EINTR) return;
      raise(errno, "poll");
    }
    if (ready == 0) continue;
    for (size_t n = 0; n < sockets_.size(); ++n)
      if (events[n].revents != 0) take_from(*sockets_[n]);
  }
}

void Server::take_from(const Socket& socket) {
  const unsigned count = messages_->receive(socket.fd());
  answers_.clear();
  for (unsigned n = 0; n < count; ++n)
    messages_->each_datagram(n, [this](std::span<const std::byte> datagram, const Endpoint& from) {
      store_.take(datagram, from, answers_);
    });
  send_answers();
}

// Those for one rank go together, so that the kernel walks its stack once for many.
void Server::send_answers() {
  const auto answers = answers_.all();
  order_.resize(answers.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
  const auto compare = [&answers](size_t a, size_t b) {
    return std::memcmp(&answers[a].to, &answers[b].to, sizeof(Endpoint));
  };
  std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return compare(a, b) < 0; });
  for (std::span<const size_t> rest(order_); !rest.empty();) {
    // As UDP_SEGMENT wants it: packets of one size, the last one may be shorter.
    Socket* socket = socket_for(answers[rest[0]].to);
    if (socket == nullptr) {
      ++store_.counters().unanswered;
      rest = rest.subspan(1);
      continue;
    }
    size_t count = 1;
    const size_t size_bytes = answers[rest[0]].size_bytes;
    while (socket->can_segment && count < std::min(rest.size(), SEGMENTS_MAX) && compare(rest[0], rest[count]) == 0 &&
           answers[rest[count]].size_bytes <= size_bytes && answers[rest[count - 1]].size_bytes == size_bytes)
      ++count;
    rest = rest.subspan(send_segments(*socket, rest.first(count)));
  }
}

// Not always the one that the datagram came to: ranks of one job may use both families, and several addresses.
Server::Socket* Server::socket_for(const Endpoint& to) {
  for (const auto& socket : sockets_)
    if (socket->sends_from(to)) return socket.get();
  return nullptr;
}

// Returns how many it is done with.
size_t Server::send_segments(Socket& socket, std::span<const size_t> numbers) {
  const auto answers = answers_.all();
  const Endpoint& to = answers[numbers[0]].to;
  aggregation_counters& counters = store_.counters();
  std::array<iovec, SEGMENTS_MAX> pieces;
  for (size_t n = 0; n < numbers.size(); ++n) {
    const auto bytes = answers_.bytes_of(answers[numbers[n]]);
    pieces[n] = {const_cast<std::byte*>(bytes.data()), bytes.size()};
  }
  sockaddr_storage address;
  Control control;
  msghdr message{};
  message.msg_name = &address;
  message.msg_namelen = write_address(to, address);
  message.msg_iov = pieces.data();
  message.msg_iovlen = numbers.size();
  message.msg_control = control.bytes;
  append_source(message, to);
  if (numbers.size() > 1) append(message, IPPROTO_UDP, UDP_SEGMENT, static_cast<uint16_t>(pieces[0].iov_len));
  const int error = socket.send(message);
  if (error != 0 && numbers.size() > 1 && (error == EIO || error == EINVAL || error == EMSGSIZE)) {
    socket.can_segment = false;  // the device cannot
    return 0;
  }
  if (error != 0) {
    counters.unanswered += numbers.size();
    return numbers.size();
  }
  counters.answers += numbers.size();
  for (size_t n = 0; n < numbers.size(); ++n) counters.sent_bytes += pieces[n].iov_len;
  return numbers.size();
}

uint64_t Server::kernel_drops() const {
  uint64_t drops = 0;
  for (const auto& socket : sockets_) {
    std::array<uint32_t, SK_MEMINFO_VARS> info{};
    socklen_t size = sizeof info;
    if (getsockopt(socket->fd(), SOL_SOCKET, SO_MEMINFO, info.data(), &size) == 0) drops += info[SK_MEMINFO_DROPS];
  }
  return drops;
}

}  // namespace sennit::aggregation
